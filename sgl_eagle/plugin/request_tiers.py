"""Which requests of the running batch speculate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from sgl_eagle.plugin.compat_requests import cached_lengths
from sgl_eagle_harness.policies.open_decisions import settled_tier
from sgl_eagle_harness.policies.planned import mean_length, plans
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.policies.tier import SpeculationTier, choose_rows
from sgl_eagle_harness.shared_rows import same_count, same_truth
from sgl_eagle_harness.types import BatchContext, BoolArray, IntArray


@dataclass(frozen=True, kw_only=True)
class TierChoice:
    """Who drafts in a round.

    Attributes:
        policy: Decides in this round: the server's, or what its plan says.
        speculating: [B] bool.
        everyone: Whether all of them draft.
        anyone: Whether one of them does.
        look: Puts `context` together.
    """

    policy: SpecPolicy
    speculating: BoolArray
    everyone: bool
    anyone: bool
    look: Callable[[], BatchContext]

    @cached_property
    def context(self) -> BatchContext:
        """What this was decided on, and what the round decides after it.

        Lengths may lag one step behind, so that prices can be looked up while the device is still
        busy. Put together where it is asked for: many policies never look at a batch.
        """
        return self.look()


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
        self._latest_policy: SpecPolicy | None = None
        self._latest_settled: bool | None = None
        self._common: bool | None = None  # the tier of all requests in the latest rounds
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
            self._count_common()
            self._common = None
            self._tiers = {name: self._tiers.get(name) or SpeculationTier() for name in names}
        self._names = names
        look: Callable[[], BatchContext] = partial(_look_at, batch, num_unseen)
        if plans(policy):
            context_len = mean_length(cached_lengths(batch))
            policy = policy.policy_of(policy.round_shape(len(names), context_len))
        settled = self._settled(policy)
        if settled is not None:
            self._enter_all(settled)
            speculating = same_truth(settled, len(names))
            return TierChoice(
                policy=policy, speculating=speculating, everyone=settled, anyone=settled, look=look
            )
        self._count_common()
        self._common = None
        context = look()
        tiers = list(self._tiers.values())
        with_switches = sum(tier.switch_ct for tier in tiers)
        speculating = choose_rows(policy, context, tiers)
        self._switch_ct += sum(tier.switch_ct for tier in tiers) - with_switches
        return TierChoice(
            policy=policy,
            speculating=speculating,
            everyone=bool(speculating.all()),
            anyone=bool(speculating.any()),
            look=lambda: context,
        )

    def take_switch_ct(self) -> int:
        """Changes of running requests since this was last asked.

        Returns:
            How many.
        """
        taken, self._switch_ct = self._switch_ct, 0
        return taken

    def _settled(self, policy: SpecPolicy) -> bool | None:
        # The same few policies are asked about in every round.
        if policy is not self._latest_policy:
            self._latest_policy, self._latest_settled = policy, settled_tier(policy)
        return self._latest_settled

    def _enter_all(self, speculates: bool) -> None:
        # As long as all do the same it is counted once, whatever the batch.
        if self._common is speculates:
            self._num_uncounted += 1
            return
        self._count_common()
        self._common = speculates
        for tier in self._tiers.values():
            before = tier.switch_ct
            tier.enter(speculates)
            self._switch_ct += tier.switch_ct - before

    def _count_common(self) -> None:
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
