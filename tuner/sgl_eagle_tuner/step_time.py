"""Time of decode steps from the cost table: the one place where replay and simulator add it up.

A step drafts, decides and verifies, one after the other:

    plain step        decode(B, ctx)
    speculative step  draft_extend(B, pending, ctx) + sum over further draft steps of
                      draft_step(B, width, ctx) + decisions * decide + verify_select
                      + verify(B, n, ctx)

The first draft step is part of draft-extend, which ends with the root's children. Where an engine
drafts ahead, only that part of a draft step counts which outlasts the decision taken meanwhile, a
stop waits for the step that runs, and what a policy does not decide costs nothing: such an engine
runs certain steps unasked, and lays out a tree that follows from confidence on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.types import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoads:
    """What K steps make the engine do, per request; for a batch, the figure its requests share.

    Attributes:
        speculated: [K] bool; False is a plain step, for which only `context_len` counts.
        context_len: [K] float64, tokens before the root.
        num_pending: [K] int64, tokens that draft-extend processes.
        widths: [K, S - 1] int64, nodes expanded in each draft step after the first; 0 if not run.
        num_decisions: [K] int64, times the policy was asked to go on drafting.
        num_certain_steps: [K] int64, draft steps after the first that follow without a decision.
        chooses_tree: [K] bool, whether the nodes to verify are a decision.
        num_draft_tokens: [K] int64, nodes verified, root included.
    """

    speculated: BoolArray
    context_len: FloatArray
    num_pending: IntArray
    widths: IntArray
    num_decisions: IntArray
    num_certain_steps: IntArray
    chooses_tree: BoolArray
    num_draft_tokens: IntArray

    def take(self, chosen: BoolArray) -> StepLoads:
        """Some of the steps.

        Args:
            chosen: [K] bool.

        Returns:
            Their loads, in the same order.
        """
        return StepLoads(**{item.name: getattr(self, item.name)[chosen] for item in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Time of K steps by part, in microseconds; all [K] float64."""

    draft_extend_us: FloatArray
    draft_us: FloatArray
    decide_us: FloatArray
    verify_us: FloatArray

    @property
    def total_us(self) -> FloatArray:
        """[K] float64, whole steps."""
        return self.draft_extend_us + self.draft_us + self.decide_us + self.verify_us


def time_steps(loads: StepLoads, costs: CostTable, *, batch_size: int) -> StepTimes:
    """Look up what steps cost at one batch size.

    Args:
        loads: K steps.
        costs: Measured costs.
        batch_size: Requests that are decoded together in each of the steps.

    Returns:
        Times of the K steps.
    """
    spec = loads.speculated
    drafting = loads.take(spec)
    times = {name: np.zeros(len(spec)) for name in ("draft_extend_us", "draft_us", "decide_us")}
    verify_us = np.zeros(len(spec))
    verify_us[~spec] = costs.decode_us(batch_size, loads.context_len[~spec])
    verify_us[spec] = costs.verify_us(batch_size, drafting.num_draft_tokens, drafting.context_len)
    times["draft_extend_us"][spec] = costs.draft_catch_up_us(
        batch_size, drafting.num_pending, drafting.context_len
    )
    times["draft_us"][spec] = _draft_us(drafting, costs, batch_size)
    times["decide_us"][spec] = _decide_us(drafting, costs)
    return StepTimes(verify_us=verify_us, **times)


def _draft_us(loads: StepLoads, costs: CostTable, batch_size: int) -> FloatArray:
    context, num_decisions = loads.context_len, loads.num_decisions
    total = np.zeros(len(context))
    for level, width in enumerate(loads.widths.T):
        run = width > 0
        if not run.any():
            continue
        step_us = costs.draft_step_us(batch_size, width[run], context[run])
        if costs.drafts_ahead:
            decided = (loads.num_certain_steps[run] <= level) & (level < num_decisions[run])
            step_us = np.maximum(step_us - np.where(decided, costs.decide_us, 0.0), 0.0)
        total[run] += step_us
    num_run = (loads.widths > 0).sum(axis=1)
    stopped = num_decisions > np.maximum(num_run, loads.num_certain_steps)
    total[stopped] += costs.wasted_draft_us(batch_size, context[stopped])
    return total


def _decide_us(loads: StepLoads, costs: CostTable) -> FloatArray:
    if not costs.drafts_ahead:
        return np.asarray(loads.num_decisions * costs.decide_us + costs.verify_select_us)
    num_open = np.maximum(loads.num_decisions - loads.num_certain_steps, 0)
    select_us = np.where(loads.chooses_tree, costs.verify_select_us, 0.0)
    return np.asarray(num_open * costs.decide_us + select_us)
