"""What a policy achieved on a set of prompts: one form for single-stream runs and for batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_eagle_harness.types import IntArray
from sgl_eagle_tuner.prompt_totals import PromptTotals
from sgl_eagle_tuner.step_time import StepLoads, StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeans:
    """Mean time of a step by part, in microseconds."""

    draft_extend_us: float
    draft_us: float
    decide_us: float
    verify_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Speed and acceptance of one policy.

    Attributes:
        totals: Tokens and time per prompt. In a batch, a step's time is divided evenly among the
            requests that ran in it, so that times still add up to the whole.
        accept_length: Tokens per request and target pass, bonus token included.
        accept_rate: Correct drafts per proposed draft (verified node other than the root); None if
            nothing was proposed.
        mean_num_draft_tokens: Mean nodes verified a request and step, root included.
        mean_num_steps: Mean draft steps of a step, the one of draft-extend included.
        speculated_share: Share of steps that drafted.
        switch_ct: Times that speculation was turned on or off.
        uncovered_share: Share of (request, step) pairs whose tree the trace does not fully hold.
        step_means: Mean step by part.
    """

    totals: PromptTotals
    accept_length: float
    accept_rate: float | None
    mean_num_draft_tokens: float
    mean_num_steps: float
    speculated_share: float
    switch_ct: int
    uncovered_share: float
    step_means: StepMeans

    @property
    def us_per_token(self) -> float:
        """Microseconds per emitted token: what the tuner minimises."""
        return self.totals.us_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """Sums over the requests of each of K steps; all [K] int64.

    Attributes:
        running: Requests in the step.
        emitted: Tokens they emitted.
        verified: Nodes that were verified for them, roots included.
        uncovered: Requests whose tree the trace does not fully hold.
    """

    running: IntArray
    emitted: IntArray
    verified: IntArray
    uncovered: IntArray


def summarise_steps(
    loads: StepLoads,
    times: StepTimes,
    counts: RequestCounts,
    *,
    totals: PromptTotals,
    switch_ct: int,
) -> Outcome:
    """Average K steps.

    Args:
        loads: What the steps made the engine do.
        times: What that cost.
        counts: What came of it.
        totals: The same steps per prompt.
        switch_ct: Changes between speculation and plain decoding.

    Returns:
        The outcome.
    """
    num_passes = int(counts.running.sum())
    num_proposed = int(counts.verified.sum()) - num_passes
    num_correct_drafts = int(counts.emitted.sum()) - num_passes
    draft_steps = loads.speculated * (1 + (loads.widths > 0).sum(axis=1))
    return Outcome(
        totals=totals,
        accept_length=int(counts.emitted.sum()) / num_passes,
        accept_rate=num_correct_drafts / num_proposed if num_proposed else None,
        mean_num_draft_tokens=int(counts.verified.sum()) / num_passes,
        mean_num_steps=float(draft_steps.mean()),
        speculated_share=float(loads.speculated.mean()),
        switch_ct=switch_ct,
        uncovered_share=int(counts.uncovered.sum()) / num_passes,
        step_means=StepMeans(
            draft_extend_us=float(np.mean(times.draft_extend_us)),
            draft_us=float(np.mean(times.draft_us)),
            decide_us=float(np.mean(times.decide_us)),
            verify_us=float(np.mean(times.verify_us)),
        ),
    )
