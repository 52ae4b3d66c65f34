"""Speculate or decode plainly: two values, a margin and a minimum dwell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np
from pydantic import Field

from sgl_eagle_harness.policies.capability import fulfils
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.records import Record
from sgl_eagle_harness.types import BatchContext, BoolArray, FloatArray


class TierConfig(Record):
    """How reluctantly a request changes between speculation and plain decoding.

    Attributes:
        margin_tok: Tokens a step by which the other tier must be better before a change.
        min_dwell_steps: Steps a request stays in a tier after a change.
    """

    margin_tok: float = Field(default=0.05, ge=0, allow_inf_nan=False)
    min_dwell_steps: int = Field(default=8, ge=1)


@runtime_checkable
class TieredPolicy(Protocol):
    """A policy that can say what each tier is worth, so that a change can be damped."""

    @property
    def tier(self) -> TierConfig:
        """Damping of changes."""
        ...

    def tier_values(self, batch: BatchContext) -> tuple[FloatArray, FloatArray]:
        """Value of one step in each tier.

        Args:
            batch: B rows.

        Returns:
            [B] float64 value of speculating and [B] float64 value of decoding plainly, in tokens
            less the price of time.
        """
        ...


class SpeculationTier:
    """The tier of one request: damps changes between speculation and plain decoding.

    Attributes:
        speculates: The current tier; None before the first step.
        dwell_steps: Steps since the last change, the changing step included.
        switch_ct: Changes so far.
    """

    def __init__(self) -> None:
        self.speculates: bool | None = None
        self.dwell_steps = 0
        self.switch_ct = 0

    def choose(self, policy: SpecPolicy, batch: BatchContext) -> bool:
        """Tier of the next step.

        Args:
            policy: Asked for its values if it has them, else for its decision, which then holds
                undamped.
            batch: The one row of this request.

        Returns:
            Whether to speculate.
        """
        if not isinstance(policy, TieredPolicy):
            return self.enter(bool(policy.should_speculate(batch)[0]))
        speculate_value, plain_value = policy.tier_values(batch)
        return self.choose_by_value(float(speculate_value[0]), float(plain_value[0]), policy.tier)

    def choose_by_value(
        self, speculate_value: float, plain_value: float, config: TierConfig
    ) -> bool:
        """Tier of the next step, from values that are at hand.

        Args:
            speculate_value: Value of a speculative step, in tokens less the price of time.
            plain_value: Value of a plain step.
            config: Damping.

        Returns:
            Whether to speculate.
        """
        rise = speculate_value - plain_value
        if self.speculates is None:
            return self.enter(rise > 0)
        may_change = self.dwell_steps >= config.min_dwell_steps
        threshold = -config.margin_tok if self.speculates else config.margin_tok
        wanted = rise > threshold
        return self.enter(wanted if may_change else self.speculates)

    def enter(self, speculates: bool) -> bool:
        """Count a step in a tier that somebody else has chosen.

        Args:
            speculates: The tier.

        Returns:
            The same.
        """
        if speculates == self.speculates:
            self.dwell_steps += 1
        else:
            self.switch_ct += self.speculates is not None
            self.speculates = speculates
            self.dwell_steps = 1
        return speculates

    def stay(self, num_steps: int) -> None:
        """Count steps in the tier that was entered last.

        Args:
            num_steps: How many.
        """
        self.dwell_steps += num_steps


def choose_rows(
    policy: SpecPolicy, batch: BatchContext, tiers: Sequence[SpeculationTier]
) -> BoolArray:
    """Tiers of the next step of requests that are decoded together.

    Args:
        policy: Asked once for all rows.
        batch: B rows.
        tiers: The B requests' tiers; updated.

    Returns:
        [B] bool, whether to speculate.
    """
    if not _is_tiered(policy):
        chosen = policy.should_speculate(batch)
        for tier, row in zip(tiers, chosen.tolist(), strict=True):
            tier.enter(row)
        return chosen
    values = zip(tiers, *policy.tier_values(batch), strict=True)
    return np.array(
        [tier.choose_by_value(float(s), float(p), policy.tier) for tier, s, p in values]
    )


def _is_tiered(policy: SpecPolicy) -> TypeGuard[TieredPolicy]:
    return fulfils(policy, TieredPolicy)
