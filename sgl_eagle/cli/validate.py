"""`sgl-eagle validate`: is the output lossless, and is replay exact, on real prompts?"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_eagle.cli.frame.arguments import positive_int
from sgl_eagle.cli.frame.output import render_table, write_result
from sgl_eagle.cli.frame.progress import progress_counter
from sgl_eagle.cli.pair_arguments import add_pair_arguments, load_pair_from
from sgl_eagle.cli.prompt_arguments import prompt_source, prompts_from

if TYPE_CHECKING:
    from sgl_eagle.reference.validate import Validation

HELP = "check on real prompts that every policy is lossless and that replay is exact"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sgl-eagle validate`.

    Args:
        parser: The command's parser.
    """
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="prompt files (default: all that are shipped)",
    )
    parser.add_argument(
        "--limit",
        type=positive_int,
        default=20,
        metavar="N",
        help="prompts of each workload (default: 20)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive_int,
        default=64,
        metavar="N",
        help="completion length at most (default: 64)",
    )
    parser.add_argument(
        "--cost",
        type=Path,
        required=True,
        metavar="FILE",
        help="cost table that the price policy decides by (`sgl-eagle profile`)",
    )
    add_pair_arguments(parser)
    parser.epilog = (
        "example: sgl-eagle validate --cost runs/cost.json --dtype float32 --limit 20\n"
        "exit code 1 if a text differs off a near tie, or a step differs from replay (in half\n"
        "precision: more steps than ties of draft scores explain)."
    )


def run(args: argparse.Namespace) -> int:
    """Validate.

    Args:
        args: Parsed arguments.

    Returns:
        0 if everything agrees, 1 if not.

    Raises:
        CostTableError: If the costs were measured on another setup than this one.
    """
    from sgl_eagle.reference.profile import cost_setup
    from sgl_eagle.reference.prompts import select_prompts
    from sgl_eagle.reference.recorder import RecordConfig
    from sgl_eagle.reference.validate import validate_pair
    from sgl_eagle_harness.cost_file import load_cost_file
    from sgl_eagle_harness.errors import CostTableError

    costs = load_cost_file(args.cost).to_table()
    prompts = select_prompts(prompts_from(args), per_workload=args.limit)
    pair = load_pair_from(args)
    try:
        costs.require_setup(cost_setup(pair))
    except CostTableError as error:
        raise CostTableError(f"--cost {args.cost}: {error}") from error
    with ExitStack() as bars:

        def on_stage(name: str, total: int, unit: str) -> Callable[[int], None]:
            return bars.enter_context(
                progress_counter(description=name, total=total, unit=unit, quiet=args.quiet)
            )

        result = validate_pair(
            pair,
            prompts,
            costs,
            config=RecordConfig(beams=(1, 2, 4, 8), max_new_tokens=args.max_new_tokens),
            source=prompt_source(args.prompts),
            on_stage=on_stage,
        )
    write_result(result, text=_as_text(result), output_format=args.format)
    return 0 if result.passed else 1


def _as_text(result: Validation) -> str:
    rows = [
        [
            each.policy,
            str(each.texts.num_prompts),
            str(each.texts.num_equal),
            str(each.texts.num_near_ties),
            str(each.texts.num_different),
            str(each.steps.num_steps),
            str(each.steps.num_equal),
            str(each.steps.num_uncovered),
            f"{each.accept_length:.2f}",
        ]
        for each in result.policies
    ]
    headers = [
        "policy",
        "prompts",
        "same text",
        "near ties",
        "different",
        "steps",
        "as replayed",
        "not recorded",
        "accept length",
    ]
    return "\n".join(
        [
            render_table(headers, rows),
            "",
            f"{result.dtype}; a near tie is a top-two logit gap of at most "
            f"{result.near_tie_bound} in the plain run; {result.step_tolerance:.1%} of steps may "
            f"differ from replay",
            "passed" if result.passed else "FAILED",
        ]
    )
