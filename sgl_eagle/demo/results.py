"""From the tuner's predictions and the engine's measurements to the numbers of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sgl_eagle.reference.measure import Measured
from sgl_eagle_tuner.prompt_totals import PromptTotals, join_totals
from sgl_eagle_tuner.report.base import Estimate
from sgl_eagle_tuner.report.speed import (
    OverallResult,
    SettingResult,
    SettingRole,
    StepTimeSplit,
    WorkloadResult,
)
from sgl_eagle_tuner.rescore import estimate
from sgl_eagle_tuner.tune_result import ReplayedSetting, TuneResult, WorkloadTuning
from sgl_eagle_tuner.validation import bootstrap_speedup, bootstrap_tok_per_s

MEASURED_ROLES: tuple[SettingRole, ...] = ("plain", "usual", "best_static", "tuned")
"""What the demo runs for real; variants are replayed only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWorkload:
    """One workload's held-out prompts, run and predicted.

    Attributes:
        workload: Its name.
        by_role: Engine runs.
        predicted: One for each setting of the tuner's result: replay of the decisions that the
            engine took, with costs that were measured between its runs.
    """

    workload: str
    by_role: Mapping[SettingRole, Measured]
    predicted: Sequence[PromptTotals]


def workload_result(
    tuning: WorkloadTuning, measured: MeasuredWorkload, *, seed: int
) -> WorkloadResult:
    """Join what was predicted and what was measured.

    Args:
        tuning: The tuner's result.
        measured: Engine runs of the same settings.
        seed: Of the bootstrap.

    Returns:
        All settings of the workload.
    """
    plain = measured.by_role["plain"].totals
    static = measured.by_role["best_static"].totals
    return WorkloadResult(
        workload=tuning.workload,
        recommended=tuning.recommended,
        reason=tuning.reason,
        settings=tuple(
            _setting(
                replayed,
                measured.by_role.get(replayed.role),
                estimate(bootstrap_tok_per_s(predicted, seed=seed)),
                (plain, static),
                seed=seed,
            )
            for replayed, predicted in zip(tuning.settings, measured.predicted, strict=True)
        ),
    )


def overall_result(
    tuned: TuneResult, measured: Sequence[MeasuredWorkload], *, seed: int
) -> OverallResult:
    """All workloads together, each with its recommended policy.

    Args:
        tuned: The tuner's result.
        measured: Engine runs, one for each workload of it.
        seed: Of the bootstrap.

    Returns:
        Ratios of total tokens over total time, and the worst prediction.
    """
    runs = {each.workload: each.by_role for each in measured}

    def together(roles: Mapping[str, SettingRole]) -> PromptTotals:
        return join_totals([runs[name][role].totals for name, role in roles.items()])

    names = [tuning.workload for tuning in tuned.workloads]
    ours = together({tuning.workload: tuning.recommended for tuning in tuned.workloads})
    gains = {
        role: estimate(bootstrap_speedup(ours, together(dict.fromkeys(names, role)), seed=seed))
        for role in MEASURED_ROLES[:3]
        if all(role in runs[name] for name in names)
    }
    return OverallResult(
        gain_over_plain=gains.get("plain"),
        gain_over_usual=gains.get("usual"),
        gain_over_best_static=gains.get("best_static"),
        worst_prediction_error=max(
            abs(predicted.tok_per_s / each.by_role[replayed.role].totals.tok_per_s - 1)
            for tuning, each in zip(tuned.workloads, measured, strict=True)
            for replayed, predicted in zip(tuning.settings, each.predicted, strict=True)
            if replayed.role in each.by_role
        ),
    )


def _setting(
    replayed: ReplayedSetting,
    measured: Measured | None,
    predicted: Estimate,
    baselines: tuple[PromptTotals, PromptTotals],
    *,
    seed: int,
) -> SettingResult:
    if measured is None:
        return SettingResult(
            role=replayed.role,
            policy=replayed.policy,
            predicted_tok_per_s=predicted,
        )
    plain, static = baselines
    totals, steps = measured.totals, measured.steps
    speed = bootstrap_tok_per_s(totals, seed=seed)
    num_proposed = sum(step.num_draft_tokens - 1 for step in steps)
    num_correct_drafts = sum(step.num_accept_tokens - 1 for step in steps)
    return SettingResult(
        role=replayed.role,
        policy=replayed.policy,
        measured_tok_per_s=estimate(speed),
        predicted_tok_per_s=predicted,
        gain_over_plain=estimate(bootstrap_speedup(totals, plain, seed=seed)),
        gain_over_best_static=estimate(bootstrap_speedup(totals, static, seed=seed)),
        time_per_token_us=Estimate(
            value=1e6 / speed.value, low=1e6 / speed.high, high=1e6 / speed.low
        ),
        accept_length=Estimate(value=totals.accept_length),
        accept_rate=num_correct_drafts / num_proposed if num_proposed else None,
        mean_num_draft_tokens=float(np.mean([step.num_draft_tokens for step in steps])),
        mean_num_steps=float(np.mean([step.speculated + len(step.widths) for step in steps])),
        speculated_share=float(np.mean([step.speculated for step in steps])),
        step_time=StepTimeSplit(
            draft_extend_us=float(np.mean([step.extend_us for step in steps])),
            draft_us=float(np.mean([step.draft_us for step in steps])),
            decide_us=float(np.mean([step.decide_us for step in steps])),
            verify_us=float(np.mean([step.verify_us for step in steps])),
        ),
        num_prompts=len(measured.prompts),
        num_tokens=int(totals.num_tokens.sum()),
    )
