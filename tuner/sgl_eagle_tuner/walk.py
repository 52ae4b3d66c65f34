"""The exact single-stream run: which positions a policy's steps start at, and what they cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.errors import TraceError
from sgl_eagle_harness.types import BoolArray, FloatArray, IntArray
from sgl_eagle_tuner.outcome import Outcome, RequestCounts, summarise_steps
from sgl_eagle_tuner.prompt_totals import PromptTotals
from sgl_eagle_tuner.replay import StepTable
from sgl_eagle_tuner.step_time import StepLoads, StepTimes, time_steps

FIRST_STEP_POSITION = 1
"""Prefill emits completion token 0, so the first step has that token as its root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Every step of decoding all prompts of a trace one after the other; K steps.

    Attributes:
        policy_name: Policy that ran.
        prompt_ids: Prompts of the trace.
        rows: [K] int64, trace positions at which the steps started, ascending.
        prompt_index: [K] int64, prompt of each step.
        num_accept_tokens: [K] int64, tokens each step emitted.
        loads: What each step made the engine do.
        times: What that cost.
        uncovered: [K] bool, the trace does not fully hold the step's tree.
        expected_accept_length: Mean over the steps of the tokens a step emits on average over the
            target's draws, not cut at the end of the text; None for greedy text, which has none.
        switch_ct: Times that speculation was turned on or off within a prompt.
    """

    policy_name: str
    prompt_ids: tuple[str, ...]
    rows: IntArray
    prompt_index: IntArray
    num_accept_tokens: IntArray
    loads: StepLoads
    times: StepTimes
    uncovered: BoolArray
    expected_accept_length: float | None
    switch_ct: int

    @property
    def num_steps(self) -> int:
        """K."""
        return len(self.rows)

    @property
    def outcome(self) -> Outcome:
        """Speed and acceptance; a prompt whose completion is one token has no step."""
        num_prompts = len(self.prompt_ids)

        def total(values: IntArray | FloatArray) -> FloatArray:
            sums = np.bincount(self.prompt_index, weights=values, minlength=num_prompts)
            return sums.astype(np.float64)

        totals = PromptTotals(
            prompt_ids=self.prompt_ids,
            num_tokens=total(self.num_accept_tokens).astype(np.int64),
            num_verifies=np.bincount(self.prompt_index, minlength=num_prompts),
            elapsed_us=total(self.times.total_us),
        )
        counts = RequestCounts(
            running=np.ones(self.num_steps, np.int64),
            emitted=self.num_accept_tokens,
            verified=self.loads.num_draft_tokens,
            uncovered=self.uncovered.astype(np.int64),
        )
        return summarise_steps(
            self.loads, self.times, counts, totals=totals, switch_ct=self.switch_ct
        )


Speculates = Callable[[int, int], bool]
"""(trace position, pending tokens) -> whether to speculate; called once a step, in text order."""


def walk(
    trace: DenseTrace,
    steps: StepTable,
    costs: CostTable,
    *,
    begin_prompt: Callable[[], Speculates] | None = None,
) -> Run:
    """Decode every prompt as the engine does at batch size one.

    A step at position i that emits n tokens is followed by a step at position i + n. Tokens that
    plain steps emit wait for the next draft-extend, which is charged for all of them. The last step
    of a text emits what is left of it, as the engine's length limit or stop token cuts it.

    Args:
        trace: P positions.
        steps: The policy's speculative step at each of them.
        costs: Measured costs.
        begin_prompt: Makes the tier decision of one request; None speculates always, or never if
            the policy does not draft.

    Returns:
        The run.

    Raises:
        TraceError: If no prompt has a completion of at least two tokens.
    """
    route = _Route()
    accept = steps.num_accept_tokens.tolist()
    drafts = bool(steps.num_drafted.any())
    bounds = trace.prompt_starts.tolist()
    for start, end in itertools.pairwise(bounds):
        first = start + FIRST_STEP_POSITION
        if begin_prompt is not None:
            route.follow_tier(first, end, accept, begin_prompt())
        elif drafts:
            route.speculate(first, end, accept)
        else:
            route.decode_plainly(first, end)
    if not route.rows:
        raise TraceError("no prompt of the trace has a completion of at least 2 tokens")
    return _finish(trace, steps, costs, route)


class _Route:
    """Steps in the making: position, pending tokens and tier of each."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.num_pending: list[int] = []
        self.speculated: list[bool] = []
        self.switch_ct = 0

    def speculate(self, row: int, end: int, accept: list[int]) -> None:
        num_pending = 1
        while row < end:
            self.rows.append(row)
            self.num_pending.append(num_pending)
            num_pending = accept[row]
            row += num_pending
        self.speculated.extend([True] * (len(self.rows) - len(self.speculated)))

    def decode_plainly(self, row: int, end: int) -> None:
        self.rows.extend(range(row, end))
        self.num_pending.extend(range(1, 1 + end - row))
        self.speculated.extend([False] * (end - row))

    def follow_tier(self, row: int, end: int, accept: list[int], speculates: Speculates) -> None:
        num_pending, before = 1, None
        while row < end:
            chosen = speculates(row, num_pending)
            self.rows.append(row)
            self.num_pending.append(num_pending)
            self.speculated.append(chosen)
            self.switch_ct += before is not None and chosen != before
            before = chosen
            emitted = accept[row] if chosen else 1
            num_pending = emitted if chosen else num_pending + 1
            row += emitted


def _finish(trace: DenseTrace, steps: StepTable, costs: CostTable, route: _Route) -> Run:
    rows = np.array(route.rows)
    speculated: BoolArray = np.array(route.speculated)
    loads = StepLoads(
        speculated=speculated,
        context_len=trace.context_len[rows].astype(np.float64),
        num_pending=np.array(route.num_pending),
        widths=np.where(speculated[:, None], steps.widths[rows], 0),
        num_decisions=np.where(speculated, steps.num_decisions[rows], 0),
        num_certain_steps=np.full(len(rows), steps.open_decisions.num_certain_steps),
        chooses_tree=np.full(len(rows), steps.open_decisions.chooses_tree),
        num_draft_tokens=np.where(speculated, steps.num_draft_tokens[rows], 1),
    )
    return Run(
        policy_name=steps.policy_name,
        prompt_ids=tuple(trace.prompt_ids),
        rows=rows,
        prompt_index=trace.prompt_index[rows].astype(np.int64),
        num_accept_tokens=np.where(speculated, steps.num_accept_tokens[rows], 1),
        loads=loads,
        times=time_steps(loads, costs, batch_size=1),
        uncovered=steps.uncovered[rows] & speculated,
        expected_accept_length=None
        if steps.expected_accept_tokens is None
        else float(np.where(speculated, steps.expected_accept_tokens[rows], 1.0).mean()),
        switch_ct=route.switch_ct,
    )
