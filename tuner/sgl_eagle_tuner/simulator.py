"""A closed loop of concurrent requests with continuous batching, on replayed steps.

At any time up to B requests decode together in synchronous steps, as a serving engine runs them; a
request that ends is replaced by the next one before the next step. Each step is costed at the live
batch size, its widths, verify size and context. Prefill is not part of the cost table, hence
outside the simulation.

Nothing here reads a clock: what a step does never depends on how long earlier ones took. So the
loop only notes what each step does, and times are looked up for all steps at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.errors import PolicyConfigError, TraceError
from sgl_eagle_harness.policies.open_decisions import OpenDecisions
from sgl_eagle_harness.types import FloatArray, IntArray
from sgl_eagle_tuner.outcome import Outcome, RequestCounts, summarise_steps
from sgl_eagle_tuner.prompt_totals import US_PER_S, PromptTotals
from sgl_eagle_tuner.replay import StepTable
from sgl_eagle_tuner.step_time import StepLoads, StepTimes, time_steps
from sgl_eagle_tuner.walk import FIRST_STEP_POSITION

US_PER_MINUTE = 60e6

BatchSpeculates = Callable[[IntArray, IntArray, int], bool]
"""(trace positions [R], pending tokens [R], batch size) -> whether this step speculates."""


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """The load and the engine's batching.

    Attributes:
        max_running: Requests that decode together at most, B.
        num_passes: Times that every prompt of the trace is served.
        seed: Of the order of the requests.
        size_per_request: Whether the engine verifies a tree size per request. If not, every tree
            is padded to the largest of the batch, as with one captured graph per size.
        switch_us: Extra time of a step at which speculation is turned on or off.
    """

    max_running: int = 1
    num_passes: int = 1
    seed: int = 0
    size_per_request: bool = False
    switch_us: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_running", "num_passes"):
            if getattr(self, name) < 1:
                raise PolicyConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What the loop did in K steps for R requests.

    Attributes:
        counts: Requests, tokens and nodes of each step.
        loads: What each step made the engine do.
        times: [K] parts of each step's time, switch costs excluded.
        elapsed_us: Whole run in microseconds, switch costs included.
        request_us: [R] float64, time from admission to the last token.
        request_tokens: [R] int64, tokens of each request, prefill's first one left out.
        switch_ct: Times that speculation was turned on or off.
        saturated_tok_per_s: Tokens per second while no slot stood empty; None if one always did.
        outcome: Speed and acceptance in the form that single-stream runs have.
    """

    counts: RequestCounts
    loads: StepLoads
    times: StepTimes
    elapsed_us: float
    request_us: FloatArray
    request_tokens: IntArray
    switch_ct: int
    saturated_tok_per_s: float | None
    outcome: Outcome

    @property
    def us_per_token(self) -> float:
        """Microseconds of the whole machine per emitted token."""
        return self.elapsed_us / float(self.counts.emitted.sum())

    @property
    def switches_per_minute(self) -> float:
        """How often speculation was turned on or off."""
        return self.switch_ct / self.elapsed_us * US_PER_MINUTE


def simulate(
    trace: DenseTrace,
    step_table: Callable[[int], StepTable],
    costs: CostTable,
    config: SimulationConfig,
    *,
    speculates: BatchSpeculates | None = None,
) -> Simulation:
    """Serve every prompt of a trace; deterministic given the seed.

    Args:
        trace: Prompts to serve.
        step_table: Batch size -> the policy's steps at every position; asked for sizes on the cost
            table's batch axis only, since a batch runs in the next larger captured size.
        costs: Measured costs; its largest batch must hold `config.max_running`.
        config: Load and batching.
        speculates: Tier decision of a step; None speculates always, or never if the policy does
            not draft.

    Returns:
        The simulation.

    Raises:
        TraceError: If no prompt has a completion of at least two tokens.
    """
    loop = _Loop(trace, config)
    captured = costs.target.batch_size
    while num_live := len(loop.live):
        larger = captured[captured >= num_live]
        size = int(larger[0]) if len(larger) else num_live  # the cost table refuses the latter
        loop.step(step_table(size), size, speculates)
    if not loop.log:
        raise TraceError("no prompt of the trace has a completion of at least 2 tokens")
    return _settle(loop, costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepNote:
    """What one step did, requests already combined."""

    batch_size: int
    requests: IntArray
    num_emitted: int
    num_verified: int
    speculated: bool
    context_len: float
    num_pending: int
    widths: IntArray
    num_decisions: int
    open_decisions: OpenDecisions
    num_draft_tokens: int
    num_uncovered: int


class _Loop:
    """Slots, queue and log of one simulation."""

    def __init__(self, trace: DenseTrace, config: SimulationConfig) -> None:
        starts = trace.prompt_starts[:-1] + FIRST_STEP_POSITION
        order = np.concatenate(
            [
                np.random.default_rng([config.seed, number]).permutation(trace.num_prompts)
                for number in range(config.num_passes)
            ]
        )
        has_steps = starts < trace.prompt_starts[1:]
        self._queue = order[has_steps[order]]
        self._trace, self._config = trace, config
        self._starts, self._ends = starts, trace.prompt_starts[1:]
        num_slots = min(config.max_running, len(self._queue))
        self._row = np.zeros(num_slots, np.int64)
        self._end = np.zeros(num_slots, np.int64)
        self._pending = np.ones(num_slots, np.int64)
        self._request = np.full(num_slots, -1)
        self._num_admitted = 0
        self.admitted_at = np.zeros(len(self._queue), np.int64)
        self.finished_at = np.zeros(len(self._queue), np.int64)
        self.request_tokens = self._ends[self._queue] - starts[self._queue]
        self.request_prompt = self._queue
        self.prompt_ids = tuple(trace.prompt_ids)
        self.log: list[_StepNote] = []
        self._admit()

    @property
    def live(self) -> IntArray:
        """Slots that hold a request, ascending."""
        return np.flatnonzero(self._request >= 0)

    @property
    def switch_us(self) -> float:
        """Cost of turning speculation on or off once."""
        return self._config.switch_us

    @property
    def max_running(self) -> int:
        """Slots."""
        return self._config.max_running

    def step(self, steps: StepTable, size: int, speculates: BatchSpeculates | None) -> None:
        """Advance every live request by one step.

        Args:
            steps: The policy's steps at this batch size.
            size: Batch size that the step runs at.
            speculates: Tier decision, see `simulate`.
        """
        live = self.live
        rows, pending = self._row[live], self._pending[live]
        if speculates is None:
            chosen = bool(steps.num_drafted[rows].any())
        else:
            chosen = speculates(rows, pending, size)
        emitted = steps.num_accept_tokens[rows] if chosen else np.ones(len(live), np.int64)
        self.log.append(self._note(steps, size, rows, emitted, speculated=chosen))
        self._pending[live] = emitted if chosen else pending + 1
        self._row[live] += emitted
        ended = live[self._row[live] >= self._end[live]]
        self.finished_at[self._request[ended]] = len(self.log)
        self._request[ended] = -1
        self._admit()

    def _admit(self) -> None:
        for slot in np.flatnonzero(self._request < 0):
            if self._num_admitted == len(self._queue):
                return
            prompt = self._queue[self._num_admitted]
            self._request[slot] = self._num_admitted
            self._row[slot], self._end[slot] = self._starts[prompt], self._ends[prompt]
            self._pending[slot] = 1
            self.admitted_at[self._num_admitted] = len(self.log)
            self._num_admitted += 1

    def _note(
        self, steps: StepTable, size: int, rows: IntArray, emitted: IntArray, *, speculated: bool
    ) -> _StepNote:
        combine = _mean_up if self._config.size_per_request else _largest
        pending = self._pending[self.live]
        widths = steps.widths[rows]
        return _StepNote(
            batch_size=size,
            requests=self._request[self.live],
            num_emitted=int(emitted.sum()),
            speculated=speculated,
            context_len=float(self._trace.context_len[rows].mean()),
            num_pending=int(combine(pending)),
            widths=combine(widths) if speculated else np.zeros(widths.shape[1], np.int64),
            num_decisions=int(steps.num_decisions[rows].max()) if speculated else 0,
            open_decisions=steps.open_decisions,
            num_draft_tokens=int(combine(steps.num_draft_tokens[rows])) if speculated else 1,
            num_verified=int(steps.num_draft_tokens[rows].sum()) if speculated else len(rows),
            num_uncovered=int(steps.uncovered[rows].sum()) if speculated else 0,
        )


def _largest(values: IntArray) -> IntArray:
    return np.asarray(values.max(axis=0))


def _mean_up(values: IntArray) -> IntArray:
    # The cost table counts whole tokens a request.
    return np.asarray(-(-values.sum(axis=0) // len(values)))


def _settle(loop: _Loop, costs: CostTable) -> Simulation:
    log = loop.log
    loads = _stack_loads(log)
    counts = RequestCounts(
        running=np.array([len(note.requests) for note in log]),
        emitted=np.array([note.num_emitted for note in log]),
        verified=np.array([note.num_verified for note in log]),
        uncovered=np.array([note.num_uncovered for note in log]),
    )
    times = _time_log(log, loads, costs)
    switched = np.append(False, loads.speculated[1:] != loads.speculated[:-1])
    step_us = times.total_us + loop.switch_us * switched
    clock = np.append(0.0, np.cumsum(step_us))
    full = counts.running == loop.max_running
    switch_ct = int(switched.sum())
    return Simulation(
        counts=counts,
        loads=loads,
        times=times,
        elapsed_us=float(clock[-1]),
        request_us=clock[loop.finished_at] - clock[loop.admitted_at],
        request_tokens=loop.request_tokens,
        switch_ct=switch_ct,
        saturated_tok_per_s=_rate(counts.emitted[full], step_us[full]),
        outcome=summarise_steps(
            loads,
            times,
            counts,
            totals=_prompt_totals(loop, counts, step_us),
            switch_ct=switch_ct,
        ),
    )


def _prompt_totals(loop: _Loop, counts: RequestCounts, step_us: FloatArray) -> PromptTotals:
    """Divide each step's time evenly among its requests and add up by prompt.

    Args:
        loop: Finished loop.
        counts: Of its steps.
        step_us: [K] float64.

    Returns:
        Sums over all passes of each prompt.
    """
    num_prompts = len(loop.prompt_ids)
    prompts = loop.request_prompt[np.concatenate([note.requests for note in loop.log])]
    shares = np.repeat(step_us / counts.running, counts.running)
    tokens = np.bincount(loop.request_prompt, loop.request_tokens, num_prompts)
    return PromptTotals(
        prompt_ids=loop.prompt_ids,
        num_tokens=tokens.astype(np.int64),
        num_verifies=np.bincount(prompts, minlength=num_prompts),
        elapsed_us=np.bincount(prompts, shares, num_prompts).astype(np.float64),
    )


def _rate(num_emitted: IntArray, step_us: FloatArray) -> float | None:
    return float(num_emitted.sum() / step_us.sum() * US_PER_S) if len(step_us) else None


def _stack_loads(log: list[_StepNote]) -> StepLoads:
    return StepLoads(
        speculated=np.array([note.speculated for note in log]),
        context_len=np.array([note.context_len for note in log]),
        num_pending=np.array([note.num_pending for note in log]),
        widths=np.stack([note.widths for note in log]),
        num_decisions=np.array([note.num_decisions for note in log]),
        num_certain_steps=np.array([note.open_decisions.num_certain_steps for note in log]),
        chooses_tree=np.array([note.open_decisions.chooses_tree for note in log]),
        num_draft_tokens=np.array([note.num_draft_tokens for note in log]),
    )


def _time_log(log: list[_StepNote], loads: StepLoads, costs: CostTable) -> StepTimes:
    sizes = np.array([note.batch_size for note in log])
    parts = {name: np.zeros(len(log)) for name in StepTimes.__slots__}
    for size in np.unique(sizes):
        at = sizes == size
        times = time_steps(loads.take(at), costs, batch_size=int(size))
        for name, values in parts.items():
            values[at] = getattr(times, name)
    return StepTimes(**parts)
