"""Gathers what the demo found into the numbers of one report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_eagle.demo.config import POLICY_FILE
from sgl_eagle.demo.results import MeasuredWorkload, overall_result, workload_result
from sgl_eagle.reference.comparison import NEAR_TIE_BOUND, compare_steps, compare_texts
from sgl_eagle.reference.ordered_attention import ATTENTION_BACKEND
from sgl_eagle.reference.pair import Pair
from sgl_eagle_harness.cost_file import CostFile
from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_tuner.provenance import RunProvenance
from sgl_eagle_tuner.report.analysis import CalibrationResult, CorrectnessCheck
from sgl_eagle_tuner.report.cost_section import summarise_costs
from sgl_eagle_tuner.report.data import DemoReport, ModelIdentity, Provenance, StageTime
from sgl_eagle_tuner.report.speed import SettingRole
from sgl_eagle_tuner.report.trees import DrawnTree
from sgl_eagle_tuner.session import ReplaySession
from sgl_eagle_tuner.tune_result import TuneResult
from sgl_eagle_tuner.validation import NUM_RESAMPLES

ROLE_TITLES: dict[SettingRole, str] = {
    "usual": "usual 5/4/8",
    "best_static": "best static setting of each workload",
    "tuned": "tuned policy of each workload",
}

SERVING_NOTE = (
    "Measured with the reference engine at batch size one on this machine. For a server, record "
    "and profile on the server's own machine: costs, and so the best setting, differ."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFindings:
    """What the stages found.

    Attributes:
        tuned: The tuner's result.
        measured: Engine runs, one for each workload.
        cost_file: Measured costs.
        calibrations: Reliability on held-out prompts.
        trees: Steps to draw.
        tuning: Trace that was tuned on.
        held_out: Trace of the prompts that the engine ran on.
        stages: Where the time went.
    """

    tuned: TuneResult
    measured: Sequence[MeasuredWorkload]
    cost_file: CostFile
    calibrations: Sequence[CalibrationResult]
    trees: Sequence[DrawnTree]
    tuning: DenseTrace
    held_out: DenseTrace
    stages: Sequence[StageTime]


def build_report(
    findings: DemoFindings, pair: Pair, here: RunProvenance, *, max_new_tokens: int
) -> DemoReport:
    """Gather everything.

    Args:
        findings: What the stages found.
        pair: Target and draft.
        here: Process and machine.
        max_new_tokens: Completion length at most.

    Returns:
        The report's numbers.
    """
    tuned, seed = findings.tuned, here.seed
    by_workload = {each.workload: each for each in findings.measured}
    return DemoReport(
        title=f"Speculation settings for {pair.target_identity.name}",
        policy_file=POLICY_FILE,
        serving_note=SERVING_NOTE,
        overall=overall_result(tuned, findings.measured, seed=seed),
        workloads=tuple(
            workload_result(tuning, by_workload[tuning.workload], seed=seed)
            for tuning in tuned.workloads
        ),
        costs=summarise_costs(findings.cost_file.to_table(), digest=findings.cost_file.sha256),
        calibrations=tuple(findings.calibrations),
        trees=tuple(findings.trees),
        searches=tuple(tuning.search for tuning in tuned.workloads),
        correctness=(*_text_checks(findings, pair.dtype), *_step_checks(findings, pair.dtype)),
        stages=tuple(findings.stages),
        provenance=_provenance(findings, pair, here, max_new_tokens),
    )


def _text_checks(findings: DemoFindings, dtype: str) -> list[CorrectnessCheck]:
    bound = NEAR_TIE_BOUND[dtype]
    checks = []
    for role, title in ROLE_TITLES.items():
        runs = [each.by_role for each in findings.measured if role in each.by_role]
        compared = compare_texts(
            [generation for by_role in runs for generation in by_role["plain"].generations],
            [generation for by_role in runs for generation in by_role[role].generations],
            bound=bound,
        )
        checks.append(
            CorrectnessCheck(
                name="Greedy output equals plain decoding",
                setting=f"{title}, {dtype}",
                unit="prompts",
                num_prompts=compared.num_prompts,
                num_compared=compared.num_prompts,
                num_equal=compared.num_equal,
                num_near_ties=compared.num_near_ties,
                bound=f"top-two logit gap of at most {bound} in the plain run",
            )
        )
    return checks


def _step_checks(findings: DemoFindings, dtype: str) -> list[CorrectnessCheck]:
    costs = findings.cost_file.to_table()
    checks = []
    for role, title in ROLE_TITLES.items():
        compared = []
        for tuning, measured in zip(findings.tuned.workloads, findings.measured, strict=True):
            setting = tuning.setting(role)
            if setting is None or role not in measured.by_role:
                continue
            trace = findings.held_out.select(workload=tuning.workload)
            table = ReplaySession(trace, costs).steps(setting.spec)
            compared.append(compare_steps(trace, table, measured.by_role[role]))
        checks.append(
            CorrectnessCheck(
                name="Replay accepts what the engine accepted",
                setting=f"{title}, {dtype}",
                unit="steps",
                num_prompts=sum(each.num_prompts for each in compared),
                num_compared=sum(each.num_steps for each in compared),
                num_equal=sum(each.num_equal for each in compared),
            )
        )
    return checks


def _provenance(
    findings: DemoFindings, pair: Pair, here: RunProvenance, max_new_tokens: int
) -> Provenance:
    config = pair.draft.config
    num_draft_parameters = sum(parameter.numel() for parameter in pair.draft.parameters())
    on_gpu = pair.target.device.startswith("cuda")
    return Provenance(
        created=here.created,
        command=here.command,
        commit=here.commit,
        versions=here.versions,
        engine="sgl-eagle reference engine",
        device=(here.gpu or "GPU") if on_gpu else "CPU",
        cpu=here.cpu,
        num_threads=torch.get_num_threads(),
        dtype=pair.dtype,
        attention_backend=ATTENTION_BACKEND,
        batch_size=1,
        target=ModelIdentity(name=pair.target_identity.name, digest=pair.target_identity.sha256),
        draft=ModelIdentity(
            name=pair.draft_identity.name,
            digest=pair.draft_identity.sha256,
            description=f"{config.kind} head, {num_draft_parameters / 1e6:.1f} M parameters, "
            f"{config.draft_vocab_size} draft tokens",
        ),
        sampling="temperature 0",
        prompts={
            "tuning": f"{findings.tuning.num_prompts} prompts",
            "held out": f"{findings.held_out.num_prompts} prompts, at most {max_new_tokens} "
            f"tokens each",
        },
        seeds={"search, bootstrap": here.seed},
        details={"intervals": f"95 %, bootstrap over prompts, {NUM_RESAMPLES} resamples"},
    )
