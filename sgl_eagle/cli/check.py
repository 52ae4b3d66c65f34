"""`sgl-eagle check`: what would silently fail with a draft and its target."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_eagle.cli.frame.arguments import naming_flags, positive_int
from sgl_eagle.cli.frame.output import write_result
from sgl_eagle.cli.frame.progress import progress_counter
from sgl_eagle.cli.pair_arguments import add_pair_arguments, prepare_device
from sgl_eagle.cli.prompt_arguments import prompts_from

if TYPE_CHECKING:
    from sgl_eagle.reference.check import DraftCheck
    from sgl_eagle_harness.types import TreeLimits

HELP = "say what would silently fail with a draft and its target"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sgl-eagle check`.

    Args:
        parser: The command's parser.
    """
    parser.add_argument("draft", metavar="DRAFT", type=Path, help="folder of an EAGLE checkpoint")
    parser.add_argument(
        "--num-steps",
        type=positive_int,
        default=5,
        metavar="N",
        help="draft steps of the smoke run (default: %(default)s)",
    )
    parser.add_argument(
        "--topk",
        type=positive_int,
        default=4,
        metavar="N",
        help="children of every expanded node (default: %(default)s)",
    )
    parser.add_argument(
        "--num-draft-tokens",
        type=positive_int,
        default=8,
        metavar="N",
        help="tokens verified in a step, root included (default: %(default)s)",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="prompt files of the smoke run (default: those shipped)",
    )
    parser.add_argument(
        "--limit",
        type=positive_int,
        default=1,
        metavar="N",
        help="prompts of each workload (default: %(default)s)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive_int,
        default=32,
        metavar="N",
        help="completion length at most (default: %(default)s)",
    )
    add_pair_arguments(parser, draft_option=False)
    parser.epilog = (
        "example: sgl-eagle check runs/head --target smollm2\n"
        "exit code 1 if anything failed; warnings alone leave it at 0."
    )


def run(args: argparse.Namespace) -> int:
    """Check.

    Args:
        args: Parsed arguments.

    Returns:
        0 if nothing failed, 1 otherwise.
    """
    limits = _limits(args)
    prepare_device(args)
    from sgl_eagle.reference.check import CheckConfig, check_draft
    from sgl_eagle.reference.check_run import NUM_RUNS
    from sgl_eagle.reference.prompts import select_prompts

    prompts = select_prompts(prompts_from(args), per_workload=args.limit)
    config = CheckConfig(
        limits=limits,
        max_new_tokens=args.max_new_tokens,
        dtype=args.dtype,
        device=args.device,
        lm_head=args.lm_head,
        draft_weights=args.draft_weights,
    )
    with (
        naming_flags(max_new_tokens="--max-new-tokens"),
        progress_counter(
            description="check", total=NUM_RUNS * len(prompts), unit="run", quiet=args.quiet
        ) as advance,
    ):
        result = check_draft(args.draft, args.target, prompts, config, on_run=lambda: advance(1))
    write_result(
        {
            "draft": result.draft,
            "target": result.target,
            "passed": result.passed,
            "checks": result.rows,
        },
        text=_as_text(result),
        output_format=args.format,
    )
    return 0 if result.passed else 1


def _limits(args: argparse.Namespace) -> TreeLimits:
    from sgl_eagle_harness.types import TreeLimits

    with naming_flags(
        num_steps="--num-steps", topk="--topk", num_draft_tokens="--num-draft-tokens"
    ):
        return TreeLimits(
            num_steps=args.num_steps, topk=args.topk, num_draft_tokens=args.num_draft_tokens
        )


def _as_text(result: DraftCheck) -> str:
    lines = []
    for row in result.rows:
        lines.append(f"{row.outcome:<11} {row.name}: {row.found}")
        lines += [f"{'':<11} -> {row.fix}"] if row.fix else []
    num_failed, num_warnings = (
        sum(row.outcome == outcome for row in result.rows) for outcome in ("failed", "warning")
    )
    return "\n".join([*lines, "", f"{num_failed} failed, {num_warnings} warnings"])
