"""The arguments that say how the target chooses its tokens."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from sgl_eagle.cli.frame.arguments import non_negative_int

if TYPE_CHECKING:
    from sgl_eagle.reference.sampling import Sampling


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--temperature`, `--top-p`, `--top-k` and `--seed`.

    Args:
        parser: The command's parser.
    """
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)"
    )
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="nucleus mass (default: 1)"
    )
    group.add_argument(
        "--top-k",
        type=non_negative_int,
        default=0,
        metavar="K",
        help="tokens kept; 0 keeps all (default: 0)",
    )
    group.add_argument("--seed", type=non_negative_int, default=0, help="seed (default: 0)")


def sampling_from(args: argparse.Namespace) -> Sampling:
    """What the arguments say.

    Args:
        args: Parsed arguments of `add_sampling_arguments`.

    Returns:
        Checked sampling parameters.
    """
    from sgl_eagle.reference.sampling import Sampling

    return Sampling(
        temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed
    )
