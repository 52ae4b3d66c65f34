"""Policies whose next frontier a drafter can foresee, so that it need not wait for a decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

from sgl_eagle_harness.policies.capability import fulfils
from sgl_eagle_harness.policies.protocol import SpecPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceOrder:
    """A promise about `SpecPolicy.select_frontier`, and perhaps about `select_verify`.

    In every row the frontier is the first nodes of the newest level in the order of their path
    confidence, highest first, lowest column first among equals. How many is the policy's decision.

    Attributes:
        num_certain_steps: Draft steps after that of the roots which the policy always takes with
            `limits.topk` nodes, or as many as a row has; it decides from then on.
        num_draft_tokens: Nodes that are verified, root included, where these are always the most
            confident of all levels, lowest column first among equals; None if it decides. A policy
            that gives it drafts for every request in every round.
    """

    num_certain_steps: int
    num_draft_tokens: int | None = None


@runtime_checkable
class ConfidenceOrdered(Protocol):
    """A policy that may give the promise."""

    @property
    def confidence_order(self) -> ConfidenceOrder | None:
        """The promise; None if frontiers are chosen in another way."""
        ...


@runtime_checkable
class PerBatchPolicy(Protocol):
    """A policy that is another one at each batch size."""

    def at(self, batch_size: int) -> SpecPolicy:
        """The policy of one batch size.

        Args:
            batch_size: Requests decoded together.

        Returns:
            A policy that decides as this one does.
        """
        ...


def confidence_order(policy: SpecPolicy, batch_size: int | None = None) -> ConfidenceOrder | None:
    """What a policy promises about its frontiers.

    Args:
        policy: Any policy.
        batch_size: Requests decoded together; None asks for what holds at every batch size.

    Returns:
        The promise; None from policies that give none.
    """
    if batch_size is not None and _differs_by_batch(policy):
        policy = policy.at(batch_size)
    return policy.confidence_order if _is_ordered(policy) else None


def _differs_by_batch(policy: SpecPolicy) -> TypeGuard[PerBatchPolicy]:
    return fulfils(policy, PerBatchPolicy)


def _is_ordered(policy: SpecPolicy) -> TypeGuard[ConfidenceOrdered]:
    return fulfils(policy, ConfidenceOrdered)
