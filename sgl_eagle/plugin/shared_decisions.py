"""A policy whose decisions are the first rank's."""

from __future__ import annotations

import numpy as np

from sgl_eagle.plugin.ranks import Ranks
from sgl_eagle_harness.policies.confidence_order import ConfidenceOrder, confidence_order
from sgl_eagle_harness.policies.planned import PlannedPolicy
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.policies.tier import TierConfig, TieredPolicy
from sgl_eagle_harness.round_shape import RoundShape
from sgl_eagle_harness.types import (
    NO_NODE,
    BatchContext,
    BoolArray,
    CandidateTrees,
    FloatArray,
    IntArray,
    TreeLimits,
)


def share_decisions(policy: SpecPolicy, ranks: Ranks) -> SpecPolicy:
    """Let all ranks decide alike: the first asks the policy, and the others are told.

    What was learnt from elapsed times differs between ranks, and with it the price.

    Args:
        policy: What decides; one that drafts.
        ranks: Who must agree.

    Returns:
        The policy itself where there is one rank.
    """
    if ranks.alone or policy.limits is None:
        return policy
    if isinstance(policy, PlannedPolicy):
        return _PlannedAlike(policy, policy.limits, ranks, policy)
    if isinstance(policy, TieredPolicy):
        return _TieredAlike(policy, policy.limits, ranks, policy)
    return _Alike(policy, policy.limits, ranks)


class _Alike:
    def __init__(self, policy: SpecPolicy, limits: TreeLimits, ranks: Ranks) -> None:
        self._policy, self._ranks = policy, ranks
        self.limits: TreeLimits = limits

    @property
    def name(self) -> str:
        return self._policy.name

    @property
    def confidence_order(self) -> ConfidenceOrder | None:
        return confidence_order(self._policy)

    def should_speculate(self, batch: BatchContext) -> BoolArray:
        leads = self._ranks.leads
        rows = self._policy.should_speculate(batch) if leads else np.empty(batch.num_rows, np.bool_)
        return self._ranks.share(rows)

    def select_frontier(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:
        chosen = self._policy.select_frontier(trees, batch) if self._ranks.leads else None
        # A draft step runs topk branches, so that no frontier is wider.
        return self._share_columns(chosen, trees.num_rows, self.limits.topk)

    def select_verify(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:
        chosen = self._policy.select_verify(trees, batch) if self._ranks.leads else None
        return self._share_columns(chosen, trees.num_rows, self.limits.num_draft_tokens - 1)

    def _share_columns(self, chosen: IntArray | None, num_rows: int, widest: int) -> IntArray:
        # [B, W] columns travel as [B, 1 + widest], behind W: one message of a size that all know.
        message = np.full((num_rows, 1 + widest), NO_NODE)
        if chosen is not None:
            message[:, 0] = chosen.shape[1]
            message[:, 1 : 1 + chosen.shape[1]] = chosen
        message = self._ranks.share(message)
        return message[:, 1 : 1 + int(message[0, 0])]


class _PlannedAlike(_Alike):
    # Rounds of a shape decide nothing, so that the shape is all that ranks must agree on.
    def __init__(
        self, policy: SpecPolicy, limits: TreeLimits, ranks: Ranks, planned: PlannedPolicy
    ) -> None:
        super().__init__(policy, limits, ranks)
        self._planned = planned

    def round_shape(self, batch_size: int, context_len: float) -> RoundShape:
        numbers = np.empty(2, np.int64)
        if self._ranks.leads:
            shape = self._planned.round_shape(batch_size, context_len)
            numbers[:] = shape.num_steps, shape.num_draft_tokens
        num_steps, num_draft_tokens = self._ranks.share(numbers).tolist()
        return RoundShape(num_steps, num_draft_tokens)

    def policy_of(self, shape: RoundShape) -> SpecPolicy:
        return self._planned.policy_of(shape)


class _TieredAlike(_Alike):
    def __init__(
        self, policy: SpecPolicy, limits: TreeLimits, ranks: Ranks, tiered: TieredPolicy
    ) -> None:
        super().__init__(policy, limits, ranks)
        self._tiered = tiered

    @property
    def tier(self) -> TierConfig:
        return self._tiered.tier

    def tier_values(self, batch: BatchContext) -> tuple[FloatArray, FloatArray]:
        values = np.empty((2, batch.num_rows))
        if self._ranks.leads:
            values[:] = self._tiered.tier_values(batch)
        speculate, plain = self._ranks.share(values)
        return speculate, plain
