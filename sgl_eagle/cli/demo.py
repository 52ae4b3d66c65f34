"""`sgl-eagle demo`: the whole job on a laptop, with a real model."""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_eagle.cli.frame.arguments import positive_int, seed_number
from sgl_eagle.cli.frame.output import render_table, write_result
from sgl_eagle.cli.frame.paths import require_empty_folder, require_writable_folder
from sgl_eagle.cli.frame.progress import progress_counter
from sgl_eagle.cli.pair_arguments import add_pair_arguments, load_pair_from
from sgl_eagle.cli.prompt_arguments import prompt_source
from sgl_eagle.demo.config import (
    COST_FILE,
    PAGE_FILE,
    POLICY_FILE,
    TRACES_FOLDER,
    TUNE_FILE,
    DemoConfig,
)

if TYPE_CHECKING:
    from sgl_eagle_tuner.report.base import Estimate
    from sgl_eagle_tuner.report.data import DemoReport

HELP = "record, profile, calibrate, tune, run for real and report, on five workloads"

DEFAULT_OUT = Path("runs/demo")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sgl-eagle demo`.

    Args:
        parser: The command's parser.
    """
    parser.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_OUT,
        metavar="DIR",
        help=f"folder for traces, costs, policy and report (default: {DEFAULT_OUT})",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier demo in that folder"
    )
    parser.add_argument(
        "--tune-prompts",
        type=positive_int,
        default=DemoConfig.num_tune_prompts,
        metavar="N",
        help="prompts of each workload to record and tune on, at most 24 (default: %(default)s)",
    )
    parser.add_argument(
        "--held-out-prompts",
        type=positive_int,
        default=DemoConfig.num_held_out_prompts,
        metavar="N",
        help="prompts of each workload to run the engine on, at most 12 (default: %(default)s)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive_int,
        default=DemoConfig.max_new_tokens,
        metavar="N",
        help="completion length at most (default: %(default)s)",
    )
    parser.add_argument(
        "--trials",
        type=positive_int,
        default=DemoConfig.num_trials,
        metavar="N",
        help="settings to search for each workload (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=seed_number,
        default=DemoConfig.seed,
        help="of search and bootstrap (default: %(default)s)",
    )
    add_pair_arguments(parser)
    parser.epilog = (
        "Everything runs on this machine and nothing is downloaded. The report is one HTML file.\n"
        "example: sgl-eagle demo --out runs/demo"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo.

    Args:
        args: Parsed arguments.

    Returns:
        0.

    Raises:
        UsageError: If the folder holds an earlier demo.
    """
    require_writable_folder(args.out, "--out")
    from sgl_eagle_harness.output_folder import sole_writer

    with sole_writer(args.out):
        _run_alone(args)
    return 0


def _run_alone(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    if args.overwrite:
        _remove_earlier_demo(args.out)
    else:
        require_empty_folder(args.out, "--out", instead="choose another or add --overwrite")
    from sgl_eagle.demo.run import Demo, run_demo
    from sgl_eagle.demo.stages import StageClock
    from sgl_eagle.reference.prompts import load_shipped_prompts, select_prompts
    from sgl_eagle_harness.atomic_file import write_text
    from sgl_eagle_tuner.report.render import render_report

    shipped = load_shipped_prompts()
    clock = StageClock()
    with clock.stage("load target and draft"):
        pair = load_pair_from(args)
    report = run_demo(
        Demo(
            pair=pair,
            tune_prompts=select_prompts(shipped, split="tune", per_workload=args.tune_prompts),
            held_out=select_prompts(shipped, split="held_out", per_workload=args.held_out_prompts),
            source=prompt_source(None),
            out=args.out,
            config=DemoConfig(
                num_tune_prompts=args.tune_prompts,
                num_held_out_prompts=args.held_out_prompts,
                max_new_tokens=args.max_new_tokens,
                num_trials=args.trials,
                seed=args.seed,
            ),
            clock=clock,
            progress=lambda description, total, unit: progress_counter(
                description=description, total=total, unit=unit, quiet=args.quiet
            ),
        )
    )
    page = args.out / PAGE_FILE
    write_text(page, render_report(report))
    seconds = time.perf_counter() - started
    write_result(report, text=_as_text(report, page, seconds), output_format=args.format)


def _remove_earlier_demo(out: Path) -> None:
    # Only what a demo writes: the folder may be one that somebody named by mistake.
    shutil.rmtree(out / TRACES_FOLDER, ignore_errors=True)
    from sgl_eagle_tuner.report.data import REPORT_FILE

    for name in (COST_FILE, POLICY_FILE, TUNE_FILE, REPORT_FILE, PAGE_FILE):
        (out / name).unlink(missing_ok=True)


def _as_text(report: DemoReport, page: Path, seconds: float) -> str:
    rows = [
        [
            result.workload,
            setting.policy.name,
            _number(setting.measured_tok_per_s),
            _number(setting.predicted_tok_per_s),
            _number(setting.gain_over_plain, digits=2),
            _number(setting.accept_length, digits=2),
            "<" if setting.role == result.recommended else "",
        ]
        for result in report.workloads
        for setting in result.settings
        if setting.measured_tok_per_s is not None
    ]
    headers = ["workload", "setting", "tok/s", "predicted", "x plain", "accept length", "run"]
    overall = report.overall
    gains = [
        f"{gain.value:.2f} times {title}"
        for gain, title in (
            (overall.gain_over_plain, "plain decoding"),
            (overall.gain_over_usual, "the usual setting"),
            (overall.gain_over_best_static, "the best static settings"),
        )
        if gain is not None
    ]
    stages = [[stage.name, f"{stage.seconds:.0f} s"] for stage in report.stages]
    return "\n".join(
        [
            "Measured on held-out prompts:",
            render_table(headers, rows),
            "",
            f"recommended policies, all workloads together: {'; '.join(gains)}",
            "",
            render_table(["where the time went", "time"], [*stages, ["all", f"{seconds:.0f} s"]]),
            "",
            f"open {page}",
        ]
    )


def _number(estimate: Estimate | None, *, digits: int = 1) -> str:
    return "not measured" if estimate is None else f"{estimate.value:.{digits}f}"
