"""Finalists and baselines on held-out prompts, and the decision between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.plain import PlainSpec
from sgl_eagle_harness.policies.plan import PlanSpec
from sgl_eagle_harness.policies.price import PriceSpec
from sgl_eagle_harness.policies.registry import PolicySpec
from sgl_eagle_harness.policies.static import StaticSpec
from sgl_eagle_tuner.baselines import Candidate
from sgl_eagle_tuner.outcome import Outcome
from sgl_eagle_tuner.prompt_totals import PromptTotals
from sgl_eagle_tuner.report.base import Estimate
from sgl_eagle_tuner.report.speed import PolicySetting, SettingRole, StepTimeSplit
from sgl_eagle_tuner.session import ReplaySession
from sgl_eagle_tuner.study import StudyOutcome
from sgl_eagle_tuner.tune_result import PriceTrajectory, ReplayedSetting, WorkloadTuning
from sgl_eagle_tuner.validation import Interval, bootstrap_speedup, bootstrap_tok_per_s, clears

DECISIONS = {
    "prune": "prune",
    "stop": "stop",
    "adapt_width": "width",
    "allow_plain": "speculate",
}
"""Switch of a price policy -> name of the decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RescoredWorkload:
    """A workload's result, and the held-out sums that the overall gain is made of.

    Attributes:
        tuning: The result.
        recommended: The recommended policy.
        plain: Plain decoding.
        best_static: The best static setting.
    """

    tuning: WorkloadTuning
    recommended: PromptTotals
    plain: PromptTotals
    best_static: PromptTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class _Yardsticks:
    """Held-out sums of the two baselines that every gain refers to."""

    plain: PromptTotals
    best_static: PromptTotals


def rescore_workload(
    workload: str,
    study: StudyOutcome,
    tuning: ReplaySession,
    held_out: ReplaySession,
    *,
    seed: int,
) -> RescoredWorkload:
    """Score baselines, finalists and variants on held-out prompts, and choose.

    The tuned policy is the best trial on the tuning prompts: choosing among finalists by their
    held-out scores would make those scores no longer held out.

    Args:
        workload: Its name.
        study: What the search found.
        tuning: Tuning prompts, for variants that no trial has scored.
        held_out: Held-out prompts of the same workload.
        seed: Of the bootstrap.

    Returns:
        The result.
    """
    baselines = {candidate.role: candidate for candidate in study.baselines[:-1]}
    sticks = _Yardsticks(
        plain=held_out.outcome(baselines["plain"].spec).totals,
        best_static=held_out.outcome(baselines["best_static"].spec).totals,
    )

    def rescore(candidate: Candidate) -> ReplayedSetting:
        return _rescore(candidate, held_out.outcome(candidate.spec), sticks, seed=seed)

    finalists = [rescore(candidate) for candidate in study.finalists]
    variants = [study.baselines[-1]]
    if study.finalists:
        variants += _switched_off(study.finalists[0], tuning)
    settings = [
        *map(rescore, baselines.values()),
        *finalists[:1],
        *map(rescore, variants),
    ]
    by_role: dict[SettingRole, ReplayedSetting] = {
        setting.role: setting for setting in settings if setting.role != "variant"
    }
    role, reason = choose_setting(by_role)
    return RescoredWorkload(
        tuning=WorkloadTuning(
            workload=workload,
            recommended=role,
            reason=reason,
            settings=tuple(settings),
            finalists=tuple(finalists),
            price=PriceTrajectory(
                price_tok_per_us=study.price.price_tok_per_us,
                converged=study.price.converged,
                trajectory=study.price.trajectory,
            ),
            search=study.search,
            num_tuning_prompts=tuning.trace.num_prompts,
            num_held_out_prompts=held_out.trace.num_prompts,
        ),
        recommended=held_out.outcome(by_role[role].spec).totals,
        plain=sticks.plain,
        best_static=sticks.best_static,
    )


def choose_setting(by_role: dict[SettingRole, ReplayedSetting]) -> tuple[SettingRole, str]:
    """Keep the simpler setting unless the gain of the next one clears its interval.

    Args:
        by_role: Plain, best static and, if a trial was feasible, tuned.

    Returns:
        Role of the setting to run, and why.
    """
    static = by_role["best_static"].gain_over_plain
    tuned = by_role.get("tuned")
    if tuned is None:
        reason = "No trial of the price policy was covered by the trace"
    elif _clears(tuned.gain_over_best_static):
        if _clears(tuned.gain_over_plain):
            return "tuned", (
                f"The tuned policy is {_describe(tuned.gain_over_best_static)} as fast as the best "
                f"static setting on held-out prompts."
            )
        reason = f"The tuned policy is {_describe(tuned.gain_over_plain)} as fast as plain decoding"
    else:
        reason = (
            f"The tuned policy is {_describe(tuned.gain_over_best_static)} as fast as the best "
            f"static setting, which does not clear the interval"
        )
    if _clears(static):
        return "best_static", f"{reason}; the best static setting is kept."
    return "plain", (
        f"{reason}; the best static setting is {_describe(static)} as fast as plain decoding, "
        f"which does not clear the interval either, so plain decoding is kept."
    )


def estimate(interval: Interval) -> Estimate:
    """The interval in the form of result files.

    Args:
        interval: From a bootstrap.

    Returns:
        The estimate; its ends always include the value itself.
    """
    return Estimate(
        value=interval.value,
        low=min(interval.low, interval.value),
        high=max(interval.high, interval.value),
    )


def describe_policy(spec: PolicySpec, name: str) -> PolicySetting:
    """A policy in terms of the flags that bound its trees.

    Args:
        spec: The policy.
        name: Its own name.

    Returns:
        The setting.
    """
    if isinstance(spec, PlainSpec):
        return PolicySetting(name=name, kind=spec.kind)
    if isinstance(spec, StaticSpec):
        return PolicySetting(
            name=name,
            kind=spec.kind,
            num_steps=max(len(path) for path in spec.paths),
            topk=1 + max(max(path) for path in spec.paths),
            num_draft_tokens=1 + len(spec.paths),
        )
    if isinstance(spec, Eagle2Spec):
        return PolicySetting(
            name=name,
            kind=spec.kind,
            num_steps=spec.num_steps,
            topk=spec.topk,
            num_draft_tokens=spec.num_draft_tokens,
        )
    if isinstance(spec, PlanSpec):
        return PolicySetting(
            name=name,
            kind=spec.kind,
            num_steps=spec.num_steps,
            topk=spec.topk,
            num_draft_tokens=spec.verify_sizes[-1],
            verify_sizes=spec.verify_sizes,
        )
    return PolicySetting(
        name=name,
        kind=spec.kind,
        num_steps=spec.num_steps,
        topk=spec.topk,
        num_draft_tokens=spec.verify_sizes[-1],
        verify_sizes=spec.verify_sizes,
        price_tok_per_us=spec.price_tok_per_us,
        calibration=spec.calibration.kind,
        decisions=tuple(name for switch, name in DECISIONS.items() if getattr(spec, switch)),
    )


def _switched_off(tuned: Candidate, tuning: ReplaySession) -> Iterator[Candidate]:
    # Without a decision, the forecast may say that plain decoding is better although it is not.
    # The variant then speculates always: what is wanted is the decision's own worth.
    if not isinstance(tuned.spec, PriceSpec):
        return
    for switch, decision in DECISIONS.items():
        if not getattr(tuned.spec, switch):
            continue
        off = tuned.spec.model_copy(update={switch: False})
        always = off.model_copy(update={"allow_plain": False})
        outcomes = [(spec, tuning.outcome(spec)) for spec in (off, always)]
        spec, outcome = min(outcomes, key=lambda scored: scored[1].us_per_token)
        yield Candidate(
            role="variant", label=f"tuned without {decision}", spec=spec, outcome=outcome
        )


def _rescore(
    candidate: Candidate, outcome: Outcome, sticks: _Yardsticks, *, seed: int
) -> ReplayedSetting:
    totals, means = outcome.totals, outcome.step_means
    return ReplayedSetting(
        role=candidate.role,
        policy=describe_policy(candidate.spec, candidate.label),
        spec=candidate.spec,
        tuning_us_per_token=candidate.outcome.us_per_token,
        us_per_token=outcome.us_per_token,
        tok_per_s=estimate(bootstrap_tok_per_s(totals, seed=seed)),
        gain_over_plain=estimate(bootstrap_speedup(totals, sticks.plain, seed=seed)),
        gain_over_best_static=estimate(bootstrap_speedup(totals, sticks.best_static, seed=seed)),
        accept_length=outcome.accept_length,
        accept_rate=outcome.accept_rate,
        mean_num_draft_tokens=outcome.mean_num_draft_tokens,
        mean_num_steps=outcome.mean_num_steps,
        speculated_share=outcome.speculated_share,
        switches=outcome.switch_ct,
        uncovered_share=outcome.uncovered_share,
        step_time=StepTimeSplit(
            draft_extend_us=means.draft_extend_us,
            draft_us=means.draft_us,
            decide_us=means.decide_us,
            verify_us=means.verify_us,
        ),
    )


def _clears(gain: Estimate) -> bool:
    assert gain.low is not None  # every gain here comes from a bootstrap
    assert gain.high is not None
    return clears(Interval(value=gain.value, low=gain.low, high=gain.high))


def _describe(gain: Estimate) -> str:
    return f"{gain.value:.2f} times ({gain.low:.2f} to {gain.high:.2f})"
