"""Policies that settle a whole round before it starts, for all requests of the batch alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeGuard, runtime_checkable

from sgl_eagle_harness.policies.capability import fulfils
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.round_shape import RoundShape


@runtime_checkable
class PlannedPolicy(Protocol):
    """A policy whose rounds wait for nobody: an engine asks it once, and then only the device."""

    def round_shape(self, batch_size: int, context_len: float) -> RoundShape:
        """What the next round of a batch does; asked once a round.

        Args:
            batch_size: Requests decoded together, which share the round.
            context_len: Tokens before their roots, on average.

        Returns:
            The shape.
        """
        ...

    def policy_of(self, shape: RoundShape) -> SpecPolicy:
        """The policy of rounds of one shape.

        Args:
            shape: From `round_shape`.

        Returns:
            EAGLE-2 trees of that depth and size, or plain decoding.
        """
        ...


def mean_length(lengths: Sequence[int]) -> float:
    """The context that counts where requests share a round.

    Args:
        lengths: Tokens before the root of each request, of at least one.

    Returns:
        Their mean.
    """
    return sum(lengths) / len(lengths)


def plans(policy: SpecPolicy) -> TypeGuard[PlannedPolicy]:
    """Whether a policy settles whole rounds.

    Args:
        policy: Any policy.

    Returns:
        True if it is a `PlannedPolicy`.
    """
    return fulfils(policy, PlannedPolicy)
