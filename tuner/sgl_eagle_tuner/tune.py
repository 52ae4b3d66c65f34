"""The whole tuner: split, search, rescore, decide, for every workload of a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sgl_eagle_harness.cost_file import CostFile
from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.errors import TraceError
from sgl_eagle_harness.policies.policy_file import PolicyFile, PolicyProvenance
from sgl_eagle_harness.policies.registry import PolicySpec
from sgl_eagle_harness.trace_checks import check_same_setup
from sgl_eagle_harness.trace_schema import SourceFile
from sgl_eagle_tuner.prompt_split import split_prompts, workloads_of
from sgl_eagle_tuner.prompt_totals import PromptTotals, join_totals
from sgl_eagle_tuner.provenance import RunProvenance
from sgl_eagle_tuner.rescore import estimate, rescore_workload
from sgl_eagle_tuner.session import ReplaySession
from sgl_eagle_tuner.simulator import SimulationConfig
from sgl_eagle_tuner.study import run_study
from sgl_eagle_tuner.study_config import StudyConfig
from sgl_eagle_tuner.tune_result import TuneResult, WorkloadTuning
from sgl_eagle_tuner.validation import bootstrap_speedup


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneInputs:
    """What a run of the tuner works on.

    Attributes:
        tuning: Prompts that trials are scored on.
        held_out: Prompts that only finalists and baselines are scored on; the same workloads.
        cost_file: Measured costs.
        trace_files: The shards, for provenance.
        provenance: This run.
    """

    tuning: DenseTrace
    held_out: DenseTrace
    cost_file: CostFile
    trace_files: tuple[SourceFile, ...]
    provenance: RunProvenance

    def __post_init__(self) -> None:
        if not self.tuning.on_path.any():
            raise TraceError(
                "no drafted node of the trace is ever right; does the draft belong to the target?"
            )
        missing = sorted(set(self.tuning.prompt_workloads) - set(self.held_out.prompt_workloads))
        if missing:
            raise TraceError(
                f"every workload needs held-out prompts; there are none of {', '.join(missing)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOutput:
    """What a run of the tuner makes.

    Attributes:
        result: Everything that was found, for the report.
        policy: The recommended policies, for the server.
    """

    result: TuneResult
    policy: PolicyFile


def tune(
    inputs: TuneInputs,
    config: StudyConfig,
    *,
    load: SimulationConfig | None = None,
    on_trial: Callable[[str], object] = lambda _workload: None,
) -> TuneOutput:
    """Tune every workload of a trace.

    Args:
        inputs: Traces, costs, provenance.
        config: How to search.
        load: Requests that decode together; None is one at a time.
        on_trial: Called with the workload, once for every trial.

    Returns:
        Result and policy file.
    """
    costs = inputs.cost_file.to_table()
    cost_sha256 = inputs.cost_file.sha256
    found: list[WorkloadTuning] = []
    recommended: list[PromptTotals] = []
    plain: list[PromptTotals] = []
    best_static: list[PromptTotals] = []
    for workload in workloads_of(inputs.tuning):
        tuning = ReplaySession(inputs.tuning.select(workload=workload), costs, load)
        held_out = ReplaySession(inputs.held_out.select(workload=workload), costs, load)

        def count_trial(name: str = workload) -> None:
            on_trial(name)

        study = run_study(workload, tuning, config, cost_sha256=cost_sha256, on_trial=count_trial)
        rescored = rescore_workload(workload, study, tuning, held_out, seed=config.seed)
        found.append(rescored.tuning)
        recommended.append(rescored.recommended)
        plain.append(rescored.plain)
        best_static.append(rescored.best_static)
    everywhere = join_totals(recommended)
    default = _default_workload(found, ReplaySession(inputs.tuning, costs, load))
    result = TuneResult(
        batch_size=1 if load is None else load.max_running,
        uncovered_limit=config.uncovered_limit,
        workloads=tuple(found),
        gain_over_plain=estimate(
            bootstrap_speedup(everywhere, join_totals(plain), seed=config.seed)
        ),
        gain_over_best_static=estimate(
            bootstrap_speedup(everywhere, join_totals(best_static), seed=config.seed)
        ),
        default_workload=default,
        trace_sha256=tuple(file.sha256 for file in inputs.trace_files),
        cost_sha256=cost_sha256,
        provenance=inputs.provenance,
    )
    return TuneOutput(result=result, policy=_policy_file(inputs, result))


def split_inputs(
    trace: DenseTrace, *, seed: int, held_out: DenseTrace | None = None
) -> tuple[DenseTrace, DenseTrace]:
    """Prompts to tune on and prompts to score on.

    Args:
        trace: Recorded prompts.
        seed: Of the split.
        held_out: Prompts recorded for scoring alone; None splits `trace`.

    Returns:
        The two traces.

    Raises:
        TraceError: If a prompt is in both, or they were recorded differently.
    """
    if held_out is None:
        return split_prompts(trace, seed=seed)
    check_same_setup(trace.header, held_out.header, ("the traces to tune on", "those held out"))
    shared = sorted(set(trace.prompt_ids) & set(held_out.prompt_ids))
    if shared:
        raise TraceError(
            f"held-out prompts must not be tuned on; {len(shared)} are in both traces, e.g. "
            f"{shared[0]!r}"
        )
    return trace, held_out


def _default_workload(found: Sequence[WorkloadTuning], everything: ReplaySession) -> str:
    def us_per_token(candidate: WorkloadTuning) -> float:
        return everything.outcome(candidate.chosen.spec).us_per_token

    return min(found, key=us_per_token).workload


def _policy_file(inputs: TuneInputs, result: TuneResult) -> PolicyFile:
    specs: dict[str, PolicySpec] = {tuned.workload: tuned.chosen.spec for tuned in result.workloads}
    header, provenance = inputs.tuning.header, inputs.provenance
    return PolicyFile(
        default=specs[result.default_workload],
        workloads=specs,
        costs=inputs.cost_file,
        provenance=PolicyProvenance(
            traces=inputs.trace_files,
            target=header.target,
            draft=header.draft,
            sampling=header.sampling,
            command=provenance.command,
            seed=provenance.seed,
            created=provenance.created,
            commit=provenance.commit,
            versions=provenance.versions,
        ),
    )
