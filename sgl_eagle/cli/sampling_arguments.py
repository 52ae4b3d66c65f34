"""The arguments that say how the target chooses its tokens."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from sgl_eagle.cli.frame.arguments import naming_flags, non_negative_int, seed_number

if TYPE_CHECKING:
    from sgl_eagle.reference.sampling_config import Sampling


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--temperature`, `--top-p`, `--top-k` and `--seed`.

    Args:
        parser: The command's parser.
    """
    from sgl_eagle.reference.sampling_config import Sampling

    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temperature",
        type=float,
        default=Sampling.temperature,
        metavar="T",
        help="0 is greedy (default: %(default)s)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=Sampling.top_p,
        metavar="P",
        help="nucleus mass (default: %(default)s)",
    )
    group.add_argument(
        "--top-k",
        type=non_negative_int,
        default=Sampling.top_k,
        metavar="K",
        help="tokens kept; 0 keeps all (default: %(default)s)",
    )
    group.add_argument(
        "--seed", type=seed_number, default=Sampling.seed, help="default: %(default)s"
    )


def sampling_from(args: argparse.Namespace) -> Sampling:
    """What the arguments say.

    Args:
        args: Parsed arguments of `add_sampling_arguments`.

    Returns:
        Checked sampling parameters.
    """
    from sgl_eagle.reference.sampling_config import Sampling

    with naming_flags(temperature="--temperature", top_p="--top-p"):
        return Sampling(
            temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed
        )
