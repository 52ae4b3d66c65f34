"""`sgl-eagle inflate`: the same function at a larger model's cost."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgl_eagle.cli.frame.arguments import (
    naming_flags,
    non_negative_int,
    positive_int,
)
from sgl_eagle.cli.frame.output import write_result
from sgl_eagle.cli.frame.paths import require_empty_folder, require_writable_folder

HELP = "make a larger pair that writes and accepts the same, to measure what serving it costs"

QUERY_HEADS_PER_KEY_HEAD = 4  # as in Llama 3 8B


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sgl-eagle inflate`.

    Args:
        parser: The command's parser.
    """
    from sgl_eagle.cli.pair_arguments import add_pair_arguments

    add_pair_arguments(parser, head_option=False)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="new folder, which will hold target and draft",
    )
    sizes = parser.add_argument_group("sizes of target and draft")
    sizes.add_argument("--hidden-size", type=positive_int, default=4096, help="default: 4096")
    sizes.add_argument(
        "--intermediate-size", type=positive_int, default=14336, help="of the MLP (default: 14336)"
    )
    sizes.add_argument(
        "--num-layers", type=positive_int, default=32, help="of the target (default: 32)"
    )
    sizes.add_argument(
        "--num-heads",
        type=positive_int,
        help="query heads (default: as many as fill the hidden size)",
    )
    sizes.add_argument(
        "--num-kv-heads",
        type=positive_int,
        help="key and value heads (default: a quarter of the query heads)",
    )
    parser.add_argument(
        "--seed", type=non_negative_int, default=0, help="of the random weights (default: 0)"
    )
    parser.epilog = (
        "New units have random weights and outputs of zero, new layers pass their input on. The\n"
        "folder appears when it is whole; 7 billion parameters take 15 GB.\n"
        "example: sgl-eagle inflate --target smollm2 --out models/inflated --device cuda"
    )


def run(args: argparse.Namespace) -> int:
    """Inflate.

    Args:
        args: Parsed arguments.

    Returns:
        0.

    Raises:
        UsageError: If `--out` holds anything, or sizes fit neither each other nor the pair.
    """
    require_writable_folder(args.out, "--out")
    require_empty_folder(args.out, "--out")
    from sgl_eagle.cli.pair_arguments import prepare_device
    from sgl_eagle.reference.draft_config import load_draft_config
    from sgl_eagle.reference.inflate import InflateConfig, inflate_pair
    from sgl_eagle.reference.inflate_weights import ModelSizes
    from sgl_eagle.reference.loading import load_target
    from sgl_eagle.reference.pair import DTYPES, SHIPPED_DRAFT

    prepare_device(args)
    draft = args.draft or SHIPPED_DRAFT
    num_heads = args.num_heads or max(args.hidden_size // load_draft_config(draft).head_dim, 1)
    num_kv_heads = args.num_kv_heads or max(num_heads // QUERY_HEADS_PER_KEY_HEAD, 1)
    flags = {
        name: f"--{name.replace('_', '-')}"
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
    }
    with naming_flags(**flags):
        sizes = ModelSizes(
            hidden_size=args.hidden_size,
            intermediate_size=args.intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
        )
        pair = inflate_pair(
            load_target(args.target, dtype=DTYPES[args.dtype]),
            draft,
            args.out,
            InflateConfig(
                sizes=sizes,
                num_layers=args.num_layers,
                dtype=DTYPES[args.dtype],
                device=args.device,
                seed=args.seed,
            ),
            quiet=args.quiet,
        )
    write_result(
        {
            "target": pair.target,
            "draft": pair.draft,
            "dtype": args.dtype,
            "num_target_parameters": pair.num_target_parameters,
            "num_draft_parameters": pair.num_draft_parameters,
        },
        text=f"wrote {pair.target}: {pair.num_target_parameters / 1e6:,.1f} million parameters\n"
        f"wrote {pair.draft}: {pair.num_draft_parameters / 1e6:,.1f} million parameters",
        output_format=args.format,
    )
    return 0
