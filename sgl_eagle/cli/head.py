"""`sgl-eagle head`: low-rank factors of a draft's LM head, and what they lose."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgl_eagle.cli.frame.arguments import num_steps, positive_int, seed_number
from sgl_eagle.cli.head_judge import evaluate
from sgl_eagle.cli.head_make import factorize, train
from sgl_eagle.cli.pair_arguments import add_pair_arguments

HELP = "make low-rank factors of a draft's LM head, train them, or measure what they lose"

EPILOG = """examples:
  sgl-eagle head factorize --draft runs/head --rank 128 --activate local:64:1
  sgl-eagle head train --draft runs/head --text runs/text --rank 64 --device cuda
  sgl-eagle head evaluate --draft runs/head --ranks 64,96,128 --shortlists local:128:1,global:256
  sgl-eagle head evaluate --draft runs/head --routes all --report runs/heads.html
`factorize` and `train` write two_stage_head/factors.safetensors into the draft's folder; --activate
makes the draft use it. `sgl-eagle train --text-only` writes text for --text.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sgl-eagle head`.

    Args:
        parser: The command's parser.
    """
    parser.add_argument("action", choices=("factorize", "train", "evaluate"), help="what to do")
    both = parser.add_argument_group("factorize, train")
    both.add_argument("--rank", type=positive_int, default=128, help="default: %(default)s")
    both.add_argument(
        "--activate",
        metavar="LIST",
        help="shortlist that the draft is to use: local:TILE:PER_TILE or global:CANDIDATES",
    )
    make = parser.add_argument_group("factorize")
    make.add_argument(
        "--method",
        choices=("freq-svd", "svd", "states-svd"),
        default="states-svd",
        help="weigh tokens by frequency, nothing, or tokens by frequency and directions by the "
        "head's inputs on the tune prompts (default: %(default)s)",
    )
    make.add_argument(
        "--traces",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="dense traces whose tokens are counted too",
    )
    make.add_argument(
        "--smoothing",
        type=float,
        default=1.0,
        help="count that every token starts with (default: %(default)s)",
    )
    _add_train_arguments(parser)
    judge = parser.add_argument_group("evaluate")
    judge.add_argument(
        "--factors",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="files of factors to compare (default: that of the draft)",
    )
    judge.add_argument(
        "--ranks", metavar="R,R,...", help="ranks to try (default: that of the factors)"
    )
    judge.add_argument(
        "--shortlists",
        default="global:256,global:512,local:64:1,local:128:1,natural:128:1",
        metavar="LIST,...",
        help="also natural:TILE:PER_TILE, without shuffling (default: %(default)s)",
    )
    judge.add_argument(
        "--routes",
        choices=("shortlists", "all"),
        default="shortlists",
        help="all: also quantised first stages, clusters of tokens and vocabularies trimmed by "
        "frequency (default: %(default)s)",
    )
    judge.add_argument(
        "--report", type=Path, metavar="HTML", help="page to write, with its JSON beside it"
    )
    judge.add_argument("--topk", type=positive_int, default=8, help="default: %(default)s")
    text = parser.add_argument_group("text the target writes (factorize: tune, evaluate: held out)")
    text.add_argument("--prompts", type=Path, nargs="+", metavar="FILE", help="prompt files")
    text.add_argument("--limit", type=positive_int, default=4, help="prompts of each workload")
    text.add_argument("--max-new-tokens", type=positive_int, default=128, metavar="N")
    text.add_argument("--num-steps", type=num_steps, default=5, metavar="N", help="draft steps")
    text.add_argument(
        "--text",
        type=Path,
        metavar="DIR",
        help="text of `sgl-eagle train`: what `train` learns from, and whose tokens others count",
    )
    add_pair_arguments(parser, head_option=False)
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Make, train or judge factors.

    Args:
        args: The parsed arguments.

    Returns:
        0.
    """
    return {"factorize": factorize, "train": train, "evaluate": evaluate}[args.action](args)


def _add_train_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("train")
    group.add_argument(
        "--steps",
        type=positive_int,
        default=1000,
        metavar="N",
        help="optimizer steps (default: %(default)s)",
    )
    group.add_argument(
        "--batch-tokens",
        type=positive_int,
        default=8192,
        metavar="N",
        help="tokens of text of one optimizer step (default: %(default)s)",
    )
    group.add_argument(
        "--lr", type=float, default=1e-3, help="peak learning rate (default: %(default)s)"
    )
    group.add_argument(
        "--eval-every",
        type=positive_int,
        default=100,
        metavar="N",
        help="optimizer steps between evaluations and resumable states (default: %(default)s)",
    )
    group.add_argument("--seed", type=seed_number, default=0, help="default: %(default)s")
    group.add_argument(
        "--resume", action="store_true", help="go on from the state beside the factors"
    )
