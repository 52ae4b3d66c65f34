"""`sgl-eagle calibrate`: from draft confidence to acceptance probability."""

from __future__ import annotations

import argparse
import typing
from pathlib import Path

from sgl_eagle.cli.frame.arguments import seed_number
from sgl_eagle.cli.frame.output import render_table, write_result
from sgl_eagle.cli.frame.paths import require_not_read, require_writable
from sgl_eagle.cli.trace_arguments import add_traces_argument

if typing.TYPE_CHECKING:
    from sgl_eagle_tuner.report.analysis import CalibrationResult, ReliabilityCurve

HELP = "fit a calibration map on dense traces and score it on held-out prompts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sgl-eagle calibrate`.

    Args:
        parser: The command's parser.
    """
    from sgl_eagle_harness.calibration import CalibrationKind

    add_traces_argument(parser)
    parser.add_argument(
        "--kind",
        choices=typing.get_args(CalibrationKind),
        default="isotonic",
        help="map to fit (default: %(default)s)",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="calibration file to write")
    parser.add_argument("--workload", help="fit on this workload only (default: all together)")
    parser.add_argument(
        "--metric",
        choices=("nll", "ece"),
        default="nll",
        help="what temperature scaling minimises (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=seed_number,
        default=0,
        help="of the choice of held-out prompts (default: 0)",
    )
    parser.epilog = (
        "A third of each workload's prompts is held out of the fit; the scores are theirs alone.\n"
        "example: sgl-eagle calibrate traces/ --kind isotonic --out calibration.json"
    )


def run(args: argparse.Namespace) -> int:
    """Fit on the tuning prompts, score on the held-out ones, write the file.

    Args:
        args: The parsed arguments.

    Returns:
        0.
    """
    from sgl_eagle_harness.calibration import CalibrationFile, save_calibration_file
    from sgl_eagle_harness.calibration_fit import fit_calibration
    from sgl_eagle_harness.trace_store import read_dense_trace
    from sgl_eagle_tuner.calibration_check import check_calibration, whole_tree
    from sgl_eagle_tuner.prompt_split import split_prompts, workloads_of

    if args.out is not None:
        require_writable(args.out, "--out")
        require_not_read(args.out, "--out", "TRACES", args.traces)
    trace = read_dense_trace(args.traces, args.workload)
    tuning, held_out = split_prompts(trace, seed=args.seed)
    limits = whole_tree(trace)
    calibration = fit_calibration(args.kind, tuning, limits, metric=args.metric)
    results = check_calibration(calibration, args.kind, held_out, limits)
    if args.out is not None:
        record = CalibrationFile(
            calibration=calibration,
            target_sha256=trace.header.target.sha256,
            draft_sha256=trace.header.draft.sha256,
            temperature=trace.header.sampling.temperature,
            num_positions=tuning.num_positions,
            workloads=tuple(workloads_of(tuning)),
        )
        save_calibration_file(args.out, record)
    write_result(
        {"kind": args.kind, "out": args.out, "held_out": results},
        text=_describe(results, args.out),
        output_format=args.format,
    )
    return 0


def _describe(results: list[CalibrationResult], out: Path | None) -> str:
    headers = ["workload", "confidence", "ECE", "Brier", "AUC", "nodes", "prompts"]
    rows = [
        [
            result.workload,
            curve.kind,
            *_scores(curve),
            str(result.num_nodes),
            str(result.num_prompts),
        ]
        for result in results
        for curve in (result.before, result.after)
        if curve is not None
    ]
    table = render_table(headers, rows)
    return table if out is None else f"{table}\nwrote {out}"


def _scores(curve: ReliabilityCurve) -> list[str]:
    return [
        "not measured" if score is None else f"{score:.4f}"
        for score in (curve.ece, curve.brier, curve.auc)
    ]
