"""Arguments of commands that replay recorded traces."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgl_eagle.cli.frame.arguments import positive_int


def add_traces_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `TRACES`, the dense traces to read.

    Args:
        parser: The command's parser.
    """
    parser.add_argument(
        "traces", metavar="TRACES", type=Path, nargs="+", help="dense shards, or folders of them"
    )


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what replayed steps cost, and how many requests share them.

    Args:
        parser: The command's parser.
    """
    parser.add_argument(
        "--cost", metavar="FILE", type=Path, required=True, help="cost table (sgl-eagle profile)"
    )
    parser.add_argument(
        "--batch-size",
        type=positive_int,
        default=1,
        help="requests that decode together, simulated in a closed loop (default: %(default)s)",
    )
