"""The verify sizes that a policy can ask for, and that a server prepares."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from sgl_eagle_harness.policies.protocol import SpecPolicy


@runtime_checkable
class SizedPolicy(Protocol):
    """A policy that knows its verify sizes."""

    @property
    def verify_sizes(self) -> tuple[int, ...]:
        """Sizes, root included, ascending."""
        ...


def verify_sizes(policy: SpecPolicy) -> tuple[int, ...]:
    """Sizes to prepare for a policy: its own, else 1, 2, 4, ... up to its limit.

    Args:
        policy: Any policy.

    Returns:
        Ascending, root included; the last holds every tree that the policy builds.
    """
    if policy.limits is None:
        return (1,)
    if isinstance(policy, SizedPolicy):
        return policy.verify_sizes
    limit = policy.limits.num_draft_tokens
    return (*(2**exponent for exponent in range((limit - 1).bit_length())), limit)
