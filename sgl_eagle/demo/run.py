"""The main job from end to end, on real models: its stages, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Protocol

from sgl_eagle.demo.config import (
    COST_FILE,
    POLICY_FILE,
    TRACES_FOLDER,
    TUNE_FILE,
    DemoConfig,
)
from sgl_eagle.demo.drawn_trees import draw_best_step
from sgl_eagle.demo.report_data import DemoFindings, build_report
from sgl_eagle.demo.results import MEASURED_ROLES, MeasuredWorkload
from sgl_eagle.demo.stages import StageClock
from sgl_eagle.reference.decode import Engine
from sgl_eagle.reference.measure import EncodedPrompt, encode_prompts, measure_policies
from sgl_eagle.reference.pair import Pair
from sgl_eagle.reference.profile import CostProfiler, ProfileConfig, measure_costs
from sgl_eagle.reference.prompts import Prompt
from sgl_eagle.reference.record_config import RecordConfig
from sgl_eagle.reference.recorder import record_prompts
from sgl_eagle_harness.calibration import CalibrationKind
from sgl_eagle_harness.calibration_fit import fit_calibration
from sgl_eagle_harness.cost_file import CostFile, save_cost_file
from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.policies.policy_file import save_policy_file
from sgl_eagle_harness.trace_schema import PromptSource
from sgl_eagle_harness.trace_store import read_dense_trace
from sgl_eagle_tuner.baselines import USUAL_LIMITS
from sgl_eagle_tuner.calibration_check import check_calibration
from sgl_eagle_tuner.provenance import RunProvenance, collect_provenance, describe_files
from sgl_eagle_tuner.report.analysis import CalibrationResult
from sgl_eagle_tuner.report.data import REPORT_FILE, DemoReport, save_report
from sgl_eagle_tuner.report.trees import DrawnTree
from sgl_eagle_tuner.session import ReplaySession
from sgl_eagle_tuner.study_config import StudyConfig
from sgl_eagle_tuner.tune import TuneInputs, TuneOutput, tune
from sgl_eagle_tuner.tune_result import save_tune_result

CONTEXT_STEP = 128
"""Spacing of the profiled context lengths, tokens."""

DRAWN_CALIBRATION: CalibrationKind = "isotonic"


class Progress(Protocol):
    """Shows how far a stage is."""

    def __call__(
        self, description: str, total: int, unit: str
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Open a bar whose value is called with units done."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What all stages share.

    Attributes:
        pair: Target and draft.
        tune_prompts: Prompts to record and tune on.
        held_out: Prompts to run the engine on.
        source: Where the prompts came from.
        out: Folder for everything that is written.
        config: How much to do.
        clock: Where the time goes.
        progress: Bars.
    """

    pair: Pair
    tune_prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    source: PromptSource
    out: Path
    config: DemoConfig
    clock: StageClock
    progress: Progress


def run_demo(demo: Demo) -> DemoReport:
    """Run all stages and write what they make.

    Args:
        demo: What to work on.

    Returns:
        The report's numbers, which lie in the folder too.
    """
    here = collect_provenance(seed=demo.config.seed)
    length = demo.config.max_new_tokens
    prompts = encode_prompts(demo.pair, demo.held_out, max_new_tokens=length)
    tune_prompts = encode_prompts(demo.pair, demo.tune_prompts, max_new_tokens=length)
    longest = length + max(len(prompt.tokens) for prompt in (*prompts, *tune_prompts))
    cost_file = _profile(demo, longest, here)
    tuning = _record(demo, demo.tune_prompts, "tune", here)
    held_out = _record(demo, demo.held_out, "held_out", here)
    with demo.clock.stage("calibrate") as notes:
        calibrations = calibrate(tuning, held_out)
        notes.append(f"fitted on {tuning.num_prompts} prompts, judged on {held_out.num_prompts}")
    tuned = _tune(demo, here, cost_file, tuning, held_out)
    measured = _measure(demo, prompts, tuned, cost_file, held_out)
    trees = _draw(demo, prompts, tuned, cost_file)
    report = build_report(
        DemoFindings(
            tuned=tuned.result,
            measured=measured,
            cost_file=cost_file,
            calibrations=calibrations,
            trees=trees,
            tuning=tuning,
            held_out=held_out,
            stages=demo.clock.stages,
        ),
        demo.pair,
        here,
        max_new_tokens=demo.config.max_new_tokens,
    )
    save_report(report, demo.out / REPORT_FILE)
    return report


def calibrate(tuning: DenseTrace, held_out: DenseTrace) -> list[CalibrationResult]:
    """Fit the map of the diagrams on the nodes of the usual tree, before its rerank, and judge it.

    Args:
        tuning: To fit on.
        held_out: To judge on.

    Returns:
        Reliability before and after, "all" first.
    """
    calibration = fit_calibration(DRAWN_CALIBRATION, tuning, USUAL_LIMITS)
    return check_calibration(calibration, DRAWN_CALIBRATION, held_out, USUAL_LIMITS)


def _profile(demo: Demo, longest: int, here: RunProvenance) -> CostFile:
    rounded = -(-longest // CONTEXT_STEP) * CONTEXT_STEP
    last = min(rounded, demo.pair.target.dims.max_positions)
    config = ProfileConfig(
        context_len=(1, *range(CONTEXT_STEP, last, CONTEXT_STEP), last),
        num_repeats=demo.config.profile_repeats,
    )
    with demo.clock.stage("profile this machine") as notes:
        passes = config.num_cells * config.num_repeats
        with demo.progress("profile", passes, "pass") as advance:
            table = measure_costs(demo.pair, config, on_cell=lambda: advance(1))
        notes.append(f"{config.num_cells} grid cells, {config.num_repeats} passes each")
    record = CostFile.from_table(
        table, num_repeats=config.num_repeats, created=datetime.now(UTC), commit=here.commit
    )
    save_cost_file(demo.out / COST_FILE, record)
    return record


def _record(demo: Demo, prompts: Sequence[Prompt], split: str, here: RunProvenance) -> DenseTrace:
    folder = demo.out / TRACES_FOLDER / split
    config = RecordConfig(
        num_steps=demo.config.num_steps,
        beams=demo.config.beams,
        max_new_tokens=demo.config.max_new_tokens,
        rows=demo.config.rows,
    )
    budget = 2 * demo.config.max_new_tokens * len(prompts)
    with demo.clock.stage(f"record dense traces ({split})") as notes:
        with demo.progress(f"record {split}", budget, "tok") as advance:
            record_prompts(
                demo.pair,
                prompts,
                folder,
                config,
                source=demo.source,
                on_tokens=advance,
                commit=here.commit,
            )
        trace = read_dense_trace(folder)
        notes.append(f"{trace.num_prompts} prompts, {trace.num_positions:,} positions")
    return trace


def _tune(
    demo: Demo,
    here: RunProvenance,
    cost_file: CostFile,
    tuning: DenseTrace,
    held_out: DenseTrace,
) -> TuneOutput:
    inputs = TuneInputs(
        tuning=tuning,
        held_out=held_out,
        cost_file=cost_file,
        trace_files=describe_files(
            [demo.out / TRACES_FOLDER / split for split in ("tune", "held_out")]
        ),
        provenance=here,
    )
    study = StudyConfig(num_trials=demo.config.num_trials, seed=demo.config.seed)
    num_workloads = len(set(tuning.prompt_workloads))
    num_trials = demo.config.num_trials * num_workloads
    with demo.clock.stage("tune") as notes:
        with demo.progress("tune", num_trials, "trial") as advance:
            tuned = tune(inputs, study, on_trial=lambda _workload: advance(1))
        notes.append(f"{num_workloads} workloads, {demo.config.num_trials} trials each")
    save_policy_file(demo.out / POLICY_FILE, tuned.policy)
    save_tune_result(demo.out / TUNE_FILE, tuned.result)
    return tuned


def _alongside_profiler(demo: Demo, cost_file: CostFile, tuned: TuneOutput) -> CostProfiler:
    # Only the part of the grid that the measured policies use, so that a round takes a second.
    settings = [setting.policy for tuning in tuned.result.workloads for setting in tuning.settings]
    largest = max(policy.num_draft_tokens or 1 for policy in settings)
    measured = cost_file.target.num_tokens
    last = next((size for size in measured if size >= largest), measured[-1])
    return CostProfiler(
        demo.pair,
        ProfileConfig(
            num_tokens=tuple(size for size in measured if size <= last),
            context_len=(cost_file.context_len[0], cost_file.context_len[-1]),
        ),
    )


def _measure(
    demo: Demo,
    prompts: Sequence[EncodedPrompt],
    tuned: TuneOutput,
    cost_file: CostFile,
    held_out: DenseTrace,
) -> list[MeasuredWorkload]:
    costs = cost_file.to_table()
    engine = Engine(demo.pair.target, demo.pair.draft)
    profiler = _alongside_profiler(demo, cost_file, tuned)
    found = []
    num_runs = len(MEASURED_ROLES) * len(prompts) * demo.config.num_repeats
    with (
        demo.clock.stage("run the engine on held-out prompts") as notes,
        demo.progress("run", num_runs, "run") as advance,
    ):
        for tuning in tuned.result.workloads:
            specs = {
                setting.role: setting.spec
                for setting in tuning.settings
                if setting.role in MEASURED_ROLES
            }
            profiler.begin()
            runs = measure_policies(
                engine,
                [prompt for prompt in prompts if prompt.workload == tuning.workload],
                {role: spec.build(costs) for role, spec in specs.items()},
                max_new_tokens=demo.config.max_new_tokens,
                stop_tokens=demo.pair.stop_tokens,
                on_run=partial(_after_run, count(1), len(specs), profiler, advance),
                num_repeats=demo.config.num_repeats,
            )
            session = ReplaySession(held_out.select(workload=tuning.workload), costs)
            alongside = profiler.table(average="mean")
            found.append(
                MeasuredWorkload(
                    workload=tuning.workload,
                    by_role=runs,
                    predicted=[
                        session.run(setting.spec, timed_by=alongside).outcome.totals
                        for setting in tuning.settings
                    ],
                )
            )
        notes.append(
            f"{len(prompts)} prompts, {len(MEASURED_ROLES)} settings side by side, costs measured "
            f"anew after every prompt"
        )
    return found


def _after_run(
    run_numbers: Iterator[int],
    runs_per_prompt: int,
    profiler: CostProfiler,
    advance: Callable[[int], None],
) -> None:
    # Costs are measured anew once all policies have decoded a prompt.
    advance(1)
    if next(run_numbers) % runs_per_prompt == 0:
        profiler.run_round()


def _draw(
    demo: Demo, prompts: Sequence[EncodedPrompt], tuned: TuneOutput, cost_file: CostFile
) -> list[DrawnTree]:
    costs = cost_file.to_table()
    drawn: list[DrawnTree] = []
    with demo.clock.stage("pick steps to draw"):
        for tuning in tuned.result.workloads[: demo.config.num_drawn_trees]:
            prompt = next(each for each in prompts if each.workload == tuning.workload)
            # A tuned policy that always decodes plainly draws nothing; a static one always drafts.
            settings = (tuning.setting("tuned"), tuning.setting("best_static"))
            steps = (
                draw_best_step(
                    demo.pair,
                    prompt,
                    setting.spec.build(costs),
                    max_new_tokens=demo.config.max_new_tokens,
                )
                for setting in settings
                if setting is not None
            )
            first = next((tree for tree in steps if tree is not None), None)
            drawn += [] if first is None else [first]
    return drawn
