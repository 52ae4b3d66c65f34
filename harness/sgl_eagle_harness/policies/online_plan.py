"""The plan of a running server: yields and times follow what happens, the choice is a look-up.

Between two refreshes it is a plain `PlanPolicy` at corrected times, and decides as purely; what it
keeps besides is which shape runs, so that equals do not alternate. A refresh takes as long as a
round of a large model, so that the device would wait for it; hence each of the rounds that follow
does a part, and the last part puts the new estimates in force.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sgl_eagle_harness.calibration import Calibration
from sgl_eagle_harness.online_calibration import OnlineCalibration
from sgl_eagle_harness.policies.confidence_order import ConfidenceOrder
from sgl_eagle_harness.policies.learning import REFRESH_STEPS, VerifiedRows, learning_pace
from sgl_eagle_harness.policies.observation_log import ObservationLog, Observations
from sgl_eagle_harness.policies.plan import PlanPolicy
from sgl_eagle_harness.policies.plan_times import PlanTimes
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.round_shape import PLAIN_ROUND, RoundShape, choose_shape
from sgl_eagle_harness.shape_estimates import DraftYield
from sgl_eagle_harness.types import (
    BatchContext,
    BoolArray,
    CandidateTrees,
    Float32Array,
    FloatArray,
    IntArray,
    TreeLimits,
)

MARGIN = 0.02
"""Share by which another shape must be predicted to be better before it replaces the one that runs;
about what the estimates move between two refreshes by chance."""
DOUBT = 0.2
"""Share by which a shape that never ran may be better than predicted, or worse; less if it has
run."""
TRIAL_ROUNDS = 4
"""Rounds that run a shape for the sake of knowing it, at most once between two refreshes."""
TRIAL_SHARE = 0.005
"""Share of the time that trials may cost, should their shapes be as bad as doubt allows. Each range
of batch sizes saves up for its own: the dearer a trial, the rarer."""
MOST_SAVED_ROUNDS = 8.0
"""Rounds that may be saved up, so that hours without a trial do not lead to many in a row."""
FIRST_STEPS = 32
"""Steps of a range of batch sizes after which its first refresh is due, and of a shape that has
replaced another: what the scheduler takes may change which is best, and requests are over soon."""
STEPS_TIMED_AT_ONCE = 64
"""Steps whose times one round learns from, which takes no longer than other parts of a refresh."""

_Key = tuple[int, float]
"""Batch size, and the context that stands for those that share a plan."""


@dataclass(slots=True)
class _Trial:
    """A shape that runs a few times at one batch size and context, although another is better."""

    key: _Key
    shape: int
    rounds_left: int = TRIAL_ROUNDS


class OnlinePlanPolicy:
    """A `PlanPolicy` whose estimates are refined while it serves.

    Attributes:
        limits: Depth, branching and the largest verify size.
    """

    def __init__(
        self,
        plan: PlanPolicy,
        calibration: Calibration,
        *,
        batch_edges: tuple[int, ...],
        refresh_steps: int = REFRESH_STEPS,
    ) -> None:
        """Start where the plan stands.

        Args:
            plan: Prior: average tree and costs.
            calibration: Prior from path confidence to acceptance probability.
            batch_edges: First batch size of each range that shares corrections of times, ascending
                from 1.
            refresh_steps: Steps between two refreshes of the estimates.

        Raises:
            CalibrationError: If the map cannot be refined.
        """
        self._plan = plan
        self._log = ObservationLog(refresh_steps)
        self._refreshing: Iterator[None] = iter(())
        self._calibration = OnlineCalibration(calibration, num_depths=plan.num_steps)
        self._yield = DraftYield(np.array(plan.expected_drafts), plan.verify_sizes)
        self._times = PlanTimes(plan, batch_edges=batch_edges)
        self._chosen: dict[tuple[_Key, int | None], int] = {}
        self._running: int | None = None
        self._latest: _Key | None = None
        self._trial: _Trial | None = None
        self._saved_rounds = np.zeros(len(batch_edges))
        self._num_steps = [0] * len(batch_edges)
        self._steps_to_look = 0
        self._table_ratio: float | None = None
        self._num_refreshes = 0
        self.limits: TreeLimits = plan.limits

    @property
    def name(self) -> str:
        """E.g. "online-plan-5-4-16": num_steps, topk, largest verify size."""
        return f"online-{self._plan.name}"

    @property
    def verify_sizes(self) -> tuple[int, ...]:
        """Sizes that the target may verify, root included, ascending from 1."""
        return self._plan.verify_sizes

    @property
    def confidence_order(self) -> ConfidenceOrder:
        """The plan's."""
        return self._plan.confidence_order

    @property
    def plan(self) -> PlanPolicy:
        """The plan until the next refresh, at the cost table's times."""
        return self._plan

    @property
    def yield_ratio(self) -> float:
        """Correct drafts seen over those that the prior's average tree led to expect."""
        return self._yield.ratio

    @property
    def num_observed_nodes(self) -> int:
        """Nodes that the calibration has learnt from."""
        return self._calibration.num_observed

    @property
    def running_shape(self) -> RoundShape | None:
        """The shape of the latest round, trials apart; None before the first."""
        return None if self._running is None else self._plan.shapes[self._running]

    def scheduler_us(self, batch_size: int) -> float:
        """The scheduler's time between two rounds of the kind that runs, as far as it was seen.

        Args:
            batch_size: Requests decoded together.

        Returns:
            Microseconds.
        """
        drafts = self.running_shape not in {None, PLAIN_ROUND}
        return self._times.scheduler_us(batch_size, drafts=drafts)

    @property
    def table_ratio(self) -> float | None:
        """Measured over predicted time of a typical round, of the latest refresh.

        The prediction is the cost table's. None where too few rounds had a device that was by far
        slower than its host.
        """
        return self._table_ratio

    @property
    def num_refreshes(self) -> int:
        """Refreshes so far."""
        return self._num_refreshes

    def shape_us(self, batch_size: int, context_len: float) -> FloatArray:
        """Predicted time of a round of every shape, corrected by what was measured.

        Args:
            batch_size: Requests decoded together.
            context_len: Tokens before the roots.

        Returns:
            [J] float64 microseconds, in the order of `plan.shapes`.
        """
        return self._times.shape_us(batch_size, context_len)

    def shape_tok_per_us(self, batch_size: int, context_len: float) -> FloatArray:
        """Predicted throughput of every shape, at times corrected by what was measured.

        Args:
            batch_size: Requests decoded together.
            context_len: Tokens before the roots.

        Returns:
            [J] float64 tokens per microsecond of the whole batch, in the order of `plan.shapes`.
        """
        tokens = self._plan.shape_tokens
        return np.asarray(batch_size * tokens / self.shape_us(batch_size, context_len))

    def price_tok_per_us(self, batch_size: int) -> float:
        """Predicted throughput of the best shape.

        Args:
            batch_size: Requests decoded together.

        Returns:
            Tokens that one microsecond of the whole batch is worth, at the latest context.
        """
        axis = self._plan.costs.target.context_len
        context_len = float(axis[0]) if self._latest is None else self._latest[1]
        return float(self.shape_tok_per_us(batch_size, context_len).max())

    def round_shape(self, batch_size: int, context_len: float) -> RoundShape:
        """What the next round does; asked once a round, since it notes what runs, and learns.

        Args:
            batch_size: Requests decoded together, which share the round.
            context_len: Tokens before their roots, on average.

        Returns:
            The best shape at this batch size and context; in a few rounds, one that is nearly as
            good and should be known better.
        """
        next(self._refreshing, None)
        key = batch_size, self._plan.planned_context(context_len)
        running = self._choose(key, self._running)
        if key == self._latest and running != self._running:
            self._steps_to_look = FIRST_STEPS
        self._latest, self._running = key, running
        trial = self._trial
        if trial is not None and trial.key == key:
            trial.rounds_left -= 1
            if not trial.rounds_left:
                self._trial = None
            return self._plan.shapes[trial.shape]
        return self._plan.shapes[self._running]

    def policy_of(self, shape: RoundShape) -> SpecPolicy:
        """The policy of rounds of one shape.

        Args:
            shape: From `round_shape`.

        Returns:
            EAGLE-2 trees of that depth and size, or plain decoding.
        """
        return self._plan.policy_of(shape)

    def should_speculate(self, batch: BatchContext) -> BoolArray:  # noqa: D102  SpecPolicy
        return self._plan.should_speculate(batch)

    def select_frontier(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:  # noqa: D102  SpecPolicy
        return self._plan.select_frontier(trees, batch)

    def select_verify(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:  # noqa: D102  SpecPolicy
        return self._plan.select_verify(trees, batch)

    def observe_nodes(
        self, depths: IntArray, path_log_confidence: Float32Array, accepted: FloatArray
    ) -> None:
        """Remember one tree until the next refresh.

        Args:
            depths: [M] int64, at least 1, of all its nodes down to a depth, in draft order.
            path_log_confidence: [M] float32, finite.
            accepted: [M] in [0, 1].
        """
        self._log.add_tree(depths, path_log_confidence, accepted)

    def observe_step(self, rows: VerifiedRows) -> None:
        """Remember what a round yielded and how long it took; rounds after a refresh is due learn.

        Args:
            rows: One finished step.
        """
        place = self._times.range_of(rows.batch_size)
        self._num_steps[place] += 1
        self._steps_to_look -= 1
        pace = learning_pace(self._num_steps[place])
        is_new = self._num_steps[place] == FIRST_STEPS or self._steps_to_look == 0
        if self._log.add_step(rows, pace) or is_new:
            for _ in self._refreshing:  # fewer rounds than parts came since it was due
                pass
            self._refreshing = self._refresh(self._log.take())

    def _choose(self, key: _Key, incumbent: int | None) -> int:
        chosen = self._chosen.get((key, incumbent))
        if chosen is None:
            speed = self.shape_tok_per_us(*key)
            chosen = choose_shape(speed, incumbent=incumbent, margin=MARGIN)
            self._chosen[key, incumbent] = chosen
        return chosen

    def _refresh(self, seen: Observations) -> Iterator[None]:
        self._calibration.observe(*seen.nodes())
        self._yield.age(len(seen.steps))
        yield
        if seen.trees:
            calibration = self._calibration.calibration()
            yield
            trees = [(depths, logs) for depths, logs, _ in seen.trees]
            self._yield.observe_trees(trees, calibration)
            yield
        self._yield.observe_rows(seen.drafted_rows())
        yield
        for start in range(0, len(seen.steps), STEPS_TIMED_AT_ONCE):
            self._learn_times(seen.steps[start : start + STEPS_TIMED_AT_ONCE])
            yield
        self._table_ratio = self._times.take_table_ratio()
        self._num_refreshes += 1
        self._plan = self._plan.with_expected_drafts(self._yield.expected_drafts())
        self._chosen.clear()
        for rows in seen.steps:
            self._saved_rounds[self._times.range_of(rows.batch_size)] += TRIAL_SHARE
        self._saved_rounds = np.minimum(self._saved_rounds, MOST_SAVED_ROUNDS)
        self._trial = None if self._latest is None else self._start_trial(self._latest)

    def _learn_times(self, steps: Sequence[VerifiedRows]) -> None:
        if self._latest is not None:
            self._times.observe(steps, self._latest[1])

    def _start_trial(self, key: _Key) -> _Trial | None:
        # Of the shape that is most likely to be better than the one that runs, in spite of all.
        speed, running = self.shape_tok_per_us(*key), self._choose(key, self._running)
        doubt = DOUBT * self._times.unknown_share(key[0])
        hoped = speed * (1 + doubt)
        hoped[running] = speed[running]
        best = int(hoped.argmax())
        if best == running:
            return None
        us = self.shape_us(*key)
        worst = speed[best] * (1 - doubt[best]) / speed[running]
        cost_rounds = TRIAL_ROUNDS * (us[best] / us[running]) * max(0.0, 1 - worst)
        if PLAIN_ROUND in (self._plan.shapes[best], self._plan.shapes[running]):
            # Where drafts follow, the draft is brought up to date, with as many tokens as are ever
            # extended at once.
            extend_us = self._plan.costs.draft_extend_us(key[0], self.verify_sizes[-1], key[1])
            cost_rounds += float(extend_us) / us[running]
        place = self._times.range_of(key[0])
        if cost_rounds > self._saved_rounds[place]:
            return None
        self._saved_rounds[place] -= cost_rounds
        return _Trial(key, best)
