"""`sgl-eagle tune`: search policies by replay and write the policy file."""

from __future__ import annotations

import argparse
import typing
from pathlib import Path

from sgl_eagle.cli.frame.arguments import naming_flags, positive_int, seed_number
from sgl_eagle.cli.frame.output import render_table, write_result
from sgl_eagle.cli.frame.paths import require_not_read, require_writable
from sgl_eagle.cli.frame.progress import progress
from sgl_eagle.cli.trace_arguments import add_load_arguments, add_traces_argument

if typing.TYPE_CHECKING:
    from sgl_eagle_tuner.tune import TuneInputs
    from sgl_eagle_tuner.tune_result import ReplayedSetting, TuneResult

HELP = "search tree depth, width, sizes and price per workload on dense traces"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sgl-eagle tune`.

    Args:
        parser: The command's parser.
    """
    from sgl_eagle_tuner.study_config import StudyConfig

    add_traces_argument(parser)
    add_load_arguments(parser)
    parser.add_argument(
        "--out", metavar="FILE", type=Path, required=True, help="policy file to write"
    )
    parser.add_argument(
        "--result", metavar="FILE", type=Path, help="also write all trials and scores as JSON"
    )
    parser.add_argument(
        "--trials",
        type=positive_int,
        default=StudyConfig.num_trials,
        help="settings to try per workload, baselines included (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=seed_number,
        default=StudyConfig.seed,
        help="of split, sampler, bootstrap (default: %(default)s)",
    )
    parser.add_argument("--workload", help="tune this workload only")
    parser.add_argument(
        "--held-out",
        metavar="TRACES",
        type=Path,
        nargs="+",
        help="traces to rescore on (default: a third of each workload's prompts)",
    )
    parser.add_argument(
        "--uncovered-limit",
        metavar="SHARE",
        type=float,
        default=StudyConfig.uncovered_limit,
        help="refuse settings whose trees the trace lacks in more than this share of steps "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="Optuna storage, to resume or to share trials between machines; searches with more "
        "than one worker are not repeatable (default: in memory)",
    )
    parser.epilog = (
        "Trials are scored by time per emitted token on tuning prompts; the best one is kept only\n"
        "where its gain over the best static setting clears a 95 % interval on held-out prompts.\n"
        "example: sgl-eagle tune traces/ --cost cost.json --out policy.json --result tune.json"
    )


def run(args: argparse.Namespace) -> int:
    """Tune, write the policy file, print the comparison.

    Args:
        args: The parsed arguments.

    Returns:
        0.
    """
    from sgl_eagle_harness.policies.policy_file import save_policy_file
    from sgl_eagle_tuner.prompt_split import workloads_of
    from sgl_eagle_tuner.simulator import SimulationConfig
    from sgl_eagle_tuner.study_config import StudyConfig
    from sgl_eagle_tuner.tune import tune
    from sgl_eagle_tuner.tune_result import save_tune_result

    _check_outputs(args)
    with naming_flags(uncovered_limit="--uncovered-limit"):
        config = StudyConfig(
            num_trials=args.trials,
            seed=args.seed,
            uncovered_limit=args.uncovered_limit,
            storage=args.storage,
        )
    inputs = _read_inputs(args)
    load = None
    if args.batch_size > 1:
        load = SimulationConfig(max_running=args.batch_size, seed=args.seed)
    num_trials = args.trials * len(workloads_of(inputs.tuning))
    bar = progress(range(num_trials), description="tune", unit="trials", quiet=args.quiet)
    output = tune(inputs, config, load=load, on_trial=lambda _workload: next(bar, None))
    for _ in bar:  # so that the bar says it is done
        pass
    save_policy_file(args.out, output.policy)
    if args.result is not None:
        save_tune_result(args.result, output.result)
    write_result(
        _summary(output.result, args.out),
        text=_describe(output.result, args.out),
        output_format=args.format,
    )
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    inputs = {"--cost": [args.cost], "TRACES": args.traces, "--held-out": args.held_out or []}
    for flag, out in (("--out", args.out), ("--result", args.result)):
        if out is not None:
            require_writable(out, flag)
            for source, paths in inputs.items():
                require_not_read(out, flag, source, paths)
    if args.result is not None:
        require_not_read(args.result, "--result", "--out", [args.out])


def _read_inputs(args: argparse.Namespace) -> TuneInputs:
    from sgl_eagle_harness.cost_file import load_cost_file
    from sgl_eagle_harness.trace_store import read_dense_trace
    from sgl_eagle_tuner.provenance import collect_provenance, describe_files
    from sgl_eagle_tuner.tune import TuneInputs, split_inputs

    cost_file = load_cost_file(args.cost)
    trace = read_dense_trace(args.traces, args.workload)
    held_out = None if args.held_out is None else read_dense_trace(args.held_out, args.workload)
    tuning, held_out = split_inputs(trace, seed=args.seed, held_out=held_out)
    return TuneInputs(
        tuning=tuning,
        held_out=held_out,
        cost_file=cost_file,
        trace_files=describe_files([*args.traces, *(args.held_out or ())]),
        provenance=collect_provenance(seed=args.seed),
    )


def _summary(result: TuneResult, out: Path) -> dict[str, object]:
    return {
        "policy_file": out,
        "batch_size": result.batch_size,
        "gain_over_plain": result.gain_over_plain,
        "gain_over_best_static": result.gain_over_best_static,
        "default_workload": result.default_workload,
        "workloads": [
            {
                "workload": tuned.workload,
                "recommended": tuned.recommended,
                "reason": tuned.reason,
                "settings": [setting.model_dump(exclude={"spec"}) for setting in tuned.settings],
            }
            for tuned in result.workloads
        ],
    }


def _describe(result: TuneResult, out: Path) -> str:
    headers = ["workload", "setting", "tok/s", "x plain", "x best static", "accept length", "run"]
    rows = [
        _row(tuned.workload, setting, chosen=setting is tuned.chosen)
        for tuned in result.workloads
        for setting in tuned.settings
    ]
    reasons = [f"{tuned.workload}: {tuned.reason}" for tuned in result.workloads]
    gain = result.gain_over_plain
    return "\n".join(
        [
            "Predicted on held-out prompts, 95 % intervals over prompts:",
            render_table(headers, rows),
            *reasons,
            f"all workloads: {gain.value:.2f} ({gain.low:.2f} to {gain.high:.2f}) times plain "
            "decoding",
            f"wrote {out}",
        ]
    )


def _row(workload: str, setting: ReplayedSetting, *, chosen: bool) -> list[str]:
    static = setting.gain_over_best_static
    return [
        workload,
        setting.policy.name,
        f"{setting.tok_per_s.value:.1f}",
        f"{setting.gain_over_plain.value:.2f}",
        f"{static.value:.2f} ({static.low:.2f} to {static.high:.2f})",
        f"{setting.accept_length:.2f}",
        "<" if chosen else "",
    ]
