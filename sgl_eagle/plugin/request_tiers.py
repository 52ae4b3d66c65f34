"""Which requests of the running batch speculate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_eagle.plugin.compat_requests import cached_lengths
from sgl_eagle_harness.policies.planned import policy_of_round
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.policies.tier import SpeculationTier, choose_rows
from sgl_eagle_harness.types import BatchContext, BoolArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TierChoice:
    """Who drafts in a round.

    Attributes:
        policy: Decides in this round: the server's, or what its plan says.
        speculating: [B] bool.
        context: What this was decided on, and what the round decides after it: lengths may lag one
            step behind, so that prices can be looked up while the device is still busy.
    """

    policy: SpecPolicy
    speculating: BoolArray
    context: BatchContext


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

    def choose(
        self, policy: SpecPolicy, batch: Any, names: list[str], num_unseen: IntArray
    ) -> TierChoice:
        """Who drafts: decided without asking the device, which is busy with the round before.

        Args:
            policy: May draft.
            batch: The running batch of B requests.
            names: Theirs; the tiers of others are forgotten.
            num_unseen: [B] int64, tokens that the draft has not seen, the root excluded.

        Returns:
            The choice.
        """
        if self._names != names:
            self._names = names
            self._tiers = {name: self._tiers.get(name) or SpeculationTier() for name in names}
        tiers = list(self._tiers.values())
        before = sum(tier.switch_ct for tier in tiers)
        context = BatchContext(
            batch_size=len(names), context_len=cached_lengths(batch), num_pending=num_unseen + 1
        )
        policy = policy_of_round(policy, context)
        speculating = choose_rows(policy, context, tiers)
        self._switch_ct += sum(tier.switch_ct for tier in tiers) - before
        return TierChoice(policy=policy, speculating=speculating, context=context)

    def take_switch_ct(self) -> int:
        """Changes of running requests since this was last asked.

        Returns:
            How many.
        """
        taken, self._switch_ct = self._switch_ct, 0
        return taken
