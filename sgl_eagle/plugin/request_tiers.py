"""Which requests of the running batch speculate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_eagle.plugin.compat_requests import cached_lengths
from sgl_eagle_harness.policies.open_decisions import settled_tier
from sgl_eagle_harness.policies.planned import PlannedPolicy, mean_length, plans
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.policies.tier import SpeculationTier, choose_rows
from sgl_eagle_harness.round_shape import RoundShape
from sgl_eagle_harness.shared_rows import same_count, same_truth
from sgl_eagle_harness.types import BatchContext, BoolArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TierChoice:
    """Who drafts in a round.

    Attributes:
        policy: Decides in this round: the server's, or what its plan says.
        num_unseen: [B] int64, tokens that the draft has not seen, the root excluded.
        speculating: [B] bool.
        everyone: Whether all of them draft.
        anyone: Whether one of them does.
        seen: What this was decided on; None where nobody looked at the batch.
    """

    policy: SpecPolicy
    num_unseen: IntArray
    speculating: BoolArray
    everyone: bool
    anyone: bool
    seen: BatchContext | None = None

    def context(self, batch: Any) -> BatchContext:
        """What the round decides on after this, put together for those who ask: many never do.

        Lengths may lag one step behind, so that prices can be looked up while the device is still
        busy.

        Args:
            batch: The running batch.

        Returns:
            That on which this was decided, if there is one.
        """
        return _look_at(batch, self.num_unseen) if self.seen is None else self.seen


class RequestTiers:
    """Remembers the tier of each running request."""

    def __init__(self, tiers: dict[str, SpeculationTier] | None = None) -> None:
        """Begin.

        Args:
            tiers: Tiers by request, as after some steps; none by default.
        """
        self._tiers = tiers or {}
        self._names = list(self._tiers)
        self._switch_ct = 0
        # Of the latest round: the policy, the same if it plans, what it planned, and who drafts.
        self._asked: SpecPolicy | None = None
        self._planner: PlannedPolicy | None = None
        self._shape: RoundShape | None = None
        self._planned: SpecPolicy | None = None
        self._latest_policy: SpecPolicy | None = None
        self._latest_tier: bool | None = None
        self._settled: TierChoice | None = None  # of the latest rounds, if nobody was asked
        self._num_uncounted = 0  # of these rounds, which the requests' tiers do not know of yet

    def choose(
        self, policy: SpecPolicy, batch: Any, names: list[str], num_unseen: IntArray
    ) -> TierChoice:
        """Who drafts: decided without asking the device, which is busy with the round before.

        Args:
            policy: May draft.
            batch: The running batch of B requests.
            names: Theirs; the tiers of others are forgotten. Not to be changed afterwards.
            num_unseen: [B] int64, tokens that the draft has not seen, the root excluded.

        Returns:
            The choice.
        """
        if self._names is not names and self._names != names:
            self._forget_settled()
            self._tiers = {name: self._tiers.get(name) or SpeculationTier() for name in names}
        self._names = names
        policy = self._policy_of_round(policy, batch)
        # Nearly every round is like the one before.
        latest = self._settled
        if latest is not None and latest.policy is policy and latest.num_unseen is num_unseen:
            self._num_uncounted += 1
            return latest
        if policy is not self._latest_policy:
            self._latest_policy, self._latest_tier = policy, settled_tier(policy)
        settled = self._latest_tier
        if settled is not None:
            self._enter_all(settled)
            self._settled = TierChoice(
                policy=policy,
                num_unseen=num_unseen,
                speculating=same_truth(settled, len(names)),
                everyone=settled,
                anyone=settled,
            )
            return self._settled
        self._forget_settled()
        context = _look_at(batch, num_unseen)
        tiers = list(self._tiers.values())
        with_switches = sum(tier.switch_ct for tier in tiers)
        speculating = choose_rows(policy, context, tiers)
        self._switch_ct += sum(tier.switch_ct for tier in tiers) - with_switches
        return TierChoice(
            policy=policy,
            num_unseen=num_unseen,
            speculating=speculating,
            everyone=bool(speculating.all()),
            anyone=bool(speculating.any()),
            seen=context,
        )

    def take_switch_ct(self) -> int:
        """Changes of running requests since this was last asked.

        Returns:
            How many.
        """
        taken, self._switch_ct = self._switch_ct, 0
        return taken

    def _policy_of_round(self, policy: SpecPolicy, batch: Any) -> SpecPolicy:
        if policy is not self._asked:
            self._asked = policy
            self._planner = policy if plans(policy) else None
            self._shape = None
        planner = self._planner
        if planner is None:
            return policy
        shape = planner.round_shape(len(self._names), mean_length(cached_lengths(batch)))
        if self._planned is None or shape is not self._shape:
            self._shape, self._planned = shape, planner.policy_of(shape)
        return self._planned

    def _enter_all(self, speculates: bool) -> None:
        # As long as all do the same it is counted once, whatever the batch.
        if self._settled is not None and self._settled.everyone is speculates:
            self._num_uncounted += 1
            return
        self._forget_settled()
        for tier in self._tiers.values():
            before = tier.switch_ct
            tier.enter(speculates)
            self._switch_ct += tier.switch_ct - before

    def _forget_settled(self) -> None:
        self._settled = None
        if self._num_uncounted:
            for tier in self._tiers.values():
                tier.stay(self._num_uncounted)
            self._num_uncounted = 0


def _look_at(batch: Any, num_unseen: IntArray) -> BatchContext:
    num_rows = len(num_unseen)
    is_behind = num_unseen is not same_count(0, num_rows)
    return BatchContext(
        batch_size=num_rows,
        context_len=np.array(cached_lengths(batch), np.int64),
        num_pending=num_unseen + 1 if is_behind else same_count(1, num_rows),
    )
