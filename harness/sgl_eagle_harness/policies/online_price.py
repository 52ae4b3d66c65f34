"""The price rule of a running server: price, calibration and expected yield follow what happens.

Between two refreshes it is a plain `PricePolicy`, one for each batch size, and decides as purely.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sgl_eagle_harness.continuation import ContinuationModel
from sgl_eagle_harness.decayed_ratio import DecayedRatio
from sgl_eagle_harness.online_calibration import OnlineCalibration
from sgl_eagle_harness.plan_throughput import PlanThroughput, plan_throughput
from sgl_eagle_harness.policies.confidence_order import ConfidenceOrder
from sgl_eagle_harness.policies.learning import REFRESH_STEPS, VerifiedRows
from sgl_eagle_harness.policies.observation_log import ObservationLog, Observations
from sgl_eagle_harness.policies.price import PricePolicy
from sgl_eagle_harness.policies.tier import TierConfig
from sgl_eagle_harness.price_tracker import PriceTracker
from sgl_eagle_harness.root_forecast import forecast_from_root
from sgl_eagle_harness.types import (
    BatchContext,
    BoolArray,
    CandidateTrees,
    Float32Array,
    FloatArray,
    IntArray,
    TreeLimits,
)

PRIOR_DRAFTS = 50.0
"""Correct drafts that the average tree counts for before any was seen."""
HALF_LIFE_ROWS = 4096.0
"""Steps of single requests after which a yield counts half. Plain steps age it too, so a server
that gave up speculation tries again."""


class OnlinePricePolicy:
    """A `PricePolicy` whose estimates are refined while it serves.

    Attributes:
        limits: Depth, branching and the largest verify size.
        tier: Damping of changes between speculation and plain decoding.
    """

    def __init__(
        self,
        policy: PricePolicy,
        *,
        typical_context: int,
        batch_edges: tuple[int, ...],
        refresh_steps: int = REFRESH_STEPS,
    ) -> None:
        """Start where the policy stands, at the price that its cost table gives.

        Args:
            policy: Prior: map, average tree, costs; its price is not used.
            typical_context: Context length at which the price is solved.
            batch_edges: First batch size of each range that shares one correction of the price.
            refresh_steps: Steps between two refreshes of the estimates.

        Raises:
            CalibrationError: If the policy's map cannot be refined.
            PolicyConfigError: If the edges do not rise from 1.
        """
        self._prior = self._base = policy
        self._context = typical_context
        self._log = ObservationLog(refresh_steps)
        self._calibration = OnlineCalibration(policy.calibration, num_depths=policy.num_steps)
        self._yield = DecayedRatio((1,), prior=PRIOR_DRAFTS, half_life=HALF_LIFE_ROWS)
        self._tracker = PriceTracker(self._solve, batch_edges=batch_edges)
        self._policies: dict[int, PricePolicy] = {}
        self._expected_drafts = forecast_from_root(
            policy.continuation,
            num_steps=policy.num_steps,
            topk=policy.topk,
            width=policy.widths[-1],
            sizes=np.arange(1, policy.verify_sizes[-1] + 1),
        )
        self.limits: TreeLimits = policy.limits
        self.tier: TierConfig = policy.tier

    @property
    def name(self) -> str:
        """E.g. "online-price-5-4-16": num_steps, topk, largest verify size."""
        return f"online-{self._prior.name}"

    @property
    def verify_sizes(self) -> tuple[int, ...]:
        """Sizes that the target may verify, root included, ascending from 1."""
        return self._prior.verify_sizes

    @property
    def confidence_order(self) -> ConfidenceOrder:
        """An order at every batch size; how many steps are certain depends on it."""
        return ConfidenceOrder(num_certain_steps=0)

    @property
    def yield_ratio(self) -> float:
        """Correct drafts seen over those that the prior's average tree led to expect."""
        return float(self._yield.values()[0])

    @property
    def num_observed_nodes(self) -> int:
        """Nodes that the calibration has learnt from."""
        return self._calibration.num_observed

    def price_tok_per_us(self, batch_size: int) -> float:
        """The price in force.

        Args:
            batch_size: Requests decoded together.

        Returns:
            Tokens that one microsecond of the whole batch is worth.
        """
        return self.at(batch_size).price_tok_per_us

    def at(self, batch_size: int) -> PricePolicy:
        """The policy in force until the next refresh.

        Args:
            batch_size: Requests decoded together.

        Returns:
            An immutable policy.
        """
        policy = self._policies.get(batch_size)
        if policy is None:
            price = self._tracker.price_tok_per_us(batch_size)
            policy = self._asking_if_it_pays(
                replace(self._base, price_tok_per_us=price), batch_size
            )
            self._policies[batch_size] = policy
        return policy

    def should_speculate(self, batch: BatchContext) -> BoolArray:  # noqa: D102  SpecPolicy
        return self.at(batch.batch_size).should_speculate(batch)

    def tier_values(self, batch: BatchContext) -> tuple[FloatArray, FloatArray]:  # noqa: D102  TieredPolicy
        return self.at(batch.batch_size).tier_values(batch)

    def select_frontier(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:  # noqa: D102  SpecPolicy
        return self.at(batch.batch_size).select_frontier(trees, batch)

    def select_verify(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:  # noqa: D102  SpecPolicy
        return self.at(batch.batch_size).select_verify(trees, batch)

    def observe_nodes(
        self, depths: IntArray, path_log_confidence: Float32Array, accepted: FloatArray
    ) -> None:
        """Remember, until the next refresh, how far confidence could be trusted.

        Args:
            depths: [M] int64, at least 1.
            path_log_confidence: [M] float32, finite.
            accepted: [M] in [0, 1].
        """
        self._log.add_tree(depths, path_log_confidence, accepted)

    def observe_step(self, rows: VerifiedRows) -> None:
        """Remember what speculation yielded and how long it took; learn from it at a refresh.

        Args:
            rows: One finished step.
        """
        if self._log.add_step(rows):
            self._refresh(self._log.take())

    def _asking_if_it_pays(self, policy: PricePolicy, batch_size: int) -> PricePolicy:
        # Where a decision takes longer than the draft steps that it may save, all are drafted.
        if not policy.rules.stop or len(policy.widths) > 1:
            return policy
        unasked = replace(policy, rules=replace(policy.rules, stop=False))
        batch = BatchContext(
            batch_size=batch_size,
            context_len=np.array([self._context]),
            num_pending=np.ones(1, np.int64),
        )
        (asked_value,), (unasked_value,) = (
            each.tier_values(batch)[0] for each in (policy, unasked)
        )
        return unasked if unasked_value > asked_value else policy

    def _refresh(self, seen: Observations) -> None:
        self._calibration.observe(*seen.nodes())
        self._learn_yield(seen)
        self._learn_speed(seen)
        continuation = scale_yield(self._prior.continuation, self.yield_ratio)
        self._base = replace(
            self._prior, calibration=self._calibration.calibration(), continuation=continuation
        )
        self._tracker.resolve()
        self._policies.clear()

    def _learn_yield(self, seen: Observations) -> None:
        self._yield.decay(float(seen.num_rows))
        correct = expected = 0.0
        for rows in seen.drafted_rows():
            column = min(rows.num_draft_tokens, self._expected_drafts.shape[1]) - 1
            expected += rows.num_rows * float(self._expected_drafts[rows.depth - 1, column])
            correct += float(rows.reached.sum())
        self._yield.add(np.zeros(1, np.int64), correct, expected)

    def _learn_speed(self, seen: Observations) -> None:
        sums: dict[int, tuple[float, float]] = {}
        for rows in seen.steps:
            if rows.elapsed_us is not None:
                tokens, us = sums.get(rows.batch_size, (0.0, 0.0))
                emitted = float(rows.num_correct_drafts + rows.num_rows)
                sums[rows.batch_size] = (tokens + emitted, us + rows.elapsed_us)
        for batch_size, (num_tokens, elapsed_us) in sums.items():
            self._tracker.observe(batch_size, num_tokens=num_tokens, elapsed_us=elapsed_us)

    def _solve(self, batch_size: int) -> PlanThroughput:
        policy = self._base
        return plan_throughput(
            policy.costs,
            policy.continuation,
            num_steps=policy.num_steps,
            topk=policy.widths[-1],
            sizes=policy.verify_sizes,
            batch_size=batch_size,
            context_len=self._context,
        )


def scale_yield(continuation: ContinuationModel, ratio: float) -> ContinuationModel:
    """The average tree of a workload whose drafts are accepted more or less often.

    Args:
        continuation: Fitted model.
        ratio: Factor on the probabilities of the average tree, at least 0.

    Returns:
        The same model of drafted nodes' children; what is forecast before anything is drafted is
        scaled, measured averages and the root's children alike, to at most 1.
    """

    def scaled(probs: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(min(1.0, ratio * prob) for prob in probs)

    root, *deeper = continuation.ratios
    return continuation.model_copy(
        update={
            "ratios": (tuple(map(scaled, root)), *deeper),
            "ranked_probs": tuple(map(scaled, continuation.ranked_probs)),
        }
    )
