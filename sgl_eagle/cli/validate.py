"""`sgl-eagle validate`: is the output lossless, and is replay exact, on real prompts?"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_eagle.cli.frame.arguments import naming_flags, positive_int
from sgl_eagle.cli.frame.output import render_table, write_result
from sgl_eagle.cli.frame.paths import require_temporary_folder
from sgl_eagle.cli.frame.progress import progress_counter
from sgl_eagle.cli.pair_arguments import add_pair_arguments, load_pair_from
from sgl_eagle.cli.prompt_arguments import prompt_source, prompts_from

if TYPE_CHECKING:
    from sgl_eagle.reference.explain import StepDifference, TextDifference
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
        "A difference is explained if the same text, read again without any tree in passes of\n"
        "other sizes, shows as much to the last place of a logit: rounding. Exit code 1 if one\n"
        "is not explained."
    )


def run(args: argparse.Namespace) -> int:
    """Validate.

    Args:
        args: Parsed arguments.

    Returns:
        0 if everything agrees or rounding explains why not, 1 otherwise.

    Raises:
        CostTableError: If the costs were measured on another setup than this one.
    """
    from sgl_eagle.reference.profile import cost_setup
    from sgl_eagle.reference.prompts import select_prompts
    from sgl_eagle.reference.record_config import RecordConfig
    from sgl_eagle.reference.validate import validate_pair
    from sgl_eagle_harness.cost_file import load_cost_file
    from sgl_eagle_harness.errors import CostTableError

    require_temporary_folder()
    costs = load_cost_file(args.cost).to_table()
    prompts = select_prompts(prompts_from(args), per_workload=args.limit)
    pair = load_pair_from(args)
    try:
        costs.require_setup(cost_setup(pair))
    except CostTableError as error:
        raise CostTableError(f"--cost {args.cost}: {error}") from error
    with naming_flags(max_new_tokens="--max-new-tokens"), ExitStack() as bars:

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
    write_result(_as_json(result), text=_as_text(result), output_format=args.format)
    return 0 if result.passed else 1


def _as_json(result: Validation) -> dict[str, object]:
    return {
        "dtype": result.dtype,
        "control_sizes": result.control_sizes,
        "passed": result.passed,
        "policies": [
            {
                "policy": each.policy,
                "accept_length": each.accept_length,
                "texts": {
                    "num_prompts": each.num_prompts,
                    "num_equal": each.num_equal_texts,
                    "num_explained": len(each.texts) - each.num_unexplained_texts,
                    "num_unexplained": each.num_unexplained_texts,
                    "differences": [_with_verdict(text) for text in each.texts],
                },
                "steps": {
                    "num_prompts": each.steps.num_prompts,
                    "num_steps": each.steps.num_steps,
                    "num_equal": each.steps.num_equal,
                    "num_reproduced": sum(step.reproduced for step in each.step_differences),
                    "num_explained": len(each.step_differences) - each.num_unexplained_steps,
                    "num_unexplained": each.num_unexplained_steps,
                    "num_same_size": each.steps.num_same_size,
                    "num_off_text": each.steps.num_off_text,
                    "num_uncovered": each.steps.num_uncovered,
                    "differences": [_with_verdict(step) for step in each.step_differences],
                },
            }
            for each in result.policies
        ],
    }


def _with_verdict(difference: TextDifference | StepDifference) -> dict[str, object]:
    return {**dataclasses.asdict(difference), "explained": difference.explained}


def _as_text(result: Validation) -> str:
    rows = [
        [
            each.policy,
            str(each.num_prompts),
            str(each.num_equal_texts),
            str(len(each.texts) - each.num_unexplained_texts),
            str(each.num_unexplained_texts),
            str(each.steps.num_steps),
            str(each.steps.num_equal),
            str(len(each.step_differences) - each.num_unexplained_steps),
            str(each.num_unexplained_steps),
            str(each.steps.num_off_text),
            str(each.steps.num_uncovered),
            f"{each.accept_length:.2f}",
        ]
        for each in result.policies
    ]
    headers = [
        "policy",
        "prompts",
        "same text",
        "rounding",
        "unexplained",
        "steps",
        "as replayed",
        "rounding",
        "unexplained",
        "off text",
        "not recorded",
        "accept length",
    ]
    sizes = ", ".join(map(str, result.control_sizes))
    return "\n".join(
        [
            render_table(headers, rows),
            *_unexplained_lines(result),
            "",
            f"{result.dtype}; rounding: the same text read without a tree, in passes of the "
            f"engine's sizes and of {sizes} tokens, shows as much",
            "passed" if result.passed else "FAILED",
        ]
    )


def _unexplained_lines(result: Validation) -> list[str]:
    texts = [
        f"{each.policy}, {text.prompt_id}, token {text.position}: "
        + (
            "one text ends, the other goes on"
            if text.gap is None
            else f"logit gap {text.gap:.4g} crossed, the controls move it by {text.moved:.4g}, "
            f"the last place is {text.rounding:.4g}"
        )
        for each in result.policies
        for text in each.texts
        if not text.explained
    ]
    steps = [
        f"{each.policy}, {step.prompt_id}, step at token {step.position}: accepted "
        f"{step.num_accept_tokens}, replay {step.num_replayed}, controls {step.fewest} to "
        f"{step.most}"
        for each in result.policies
        for step in each.step_differences
        if not step.explained
    ]
    return ["", "unexplained:", *texts, *steps] if texts or steps else []
