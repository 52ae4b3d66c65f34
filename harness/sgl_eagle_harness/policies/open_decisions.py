"""What an engine that drafts ahead has to ask a policy in a round, once it speculates."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_eagle_harness.policies.confidence_order import confidence_order
from sgl_eagle_harness.policies.planned import plans
from sgl_eagle_harness.policies.protocol import SpecPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDecisions:
    """Decisions that do not follow from the policy's promises; an engine that waits asks for all.

    Attributes:
        num_certain_steps: Draft steps after that of the roots which are run unasked; whether and
            how wide to go on is decided from then on.
        chooses_tree: Whether the nodes to verify are chosen by the host; if not, the device takes
            the most confident ones.
    """

    num_certain_steps: int
    chooses_tree: bool


def open_decisions(policy: SpecPolicy, batch_size: int | None = None) -> OpenDecisions:
    """What a policy decides in a round.

    Args:
        policy: Any policy.
        batch_size: Requests decoded together; None asks for what holds at every batch size.

    Returns:
        The decisions; none of a policy that plans its rounds, since a round's depth and size are
        settled before it starts.
    """
    limits = policy.limits
    if limits is not None and plans(policy):
        return OpenDecisions(num_certain_steps=limits.num_steps - 1, chooses_tree=False)
    order = confidence_order(policy, batch_size)
    if order is None:
        return OpenDecisions(num_certain_steps=0, chooses_tree=True)
    return OpenDecisions(
        num_certain_steps=order.num_certain_steps, chooses_tree=order.num_draft_tokens is None
    )


def decides_nothing(policy: SpecPolicy) -> bool:
    """Whether an engine can launch a whole round without asking a policy.

    Args:
        policy: Any policy.

    Returns:
        True if its draft steps and verified nodes follow from confidences alone.
    """
    limits = policy.limits
    if limits is None or plans(policy):
        return False
    nothing = OpenDecisions(num_certain_steps=limits.num_steps - 1, chooses_tree=False)
    return open_decisions(policy) == nothing


def may_decide_nothing(policy: SpecPolicy) -> bool:
    """Whether there can be such rounds.

    Args:
        policy: Any policy.

    Returns:
        True also for policies that settle each round before it starts.
    """
    return decides_nothing(policy) or plans(policy)


def settled_tier(policy: SpecPolicy) -> bool | None:
    """What every request does under a policy that never looks at any.

    Args:
        policy: Any policy.

    Returns:
        True if all requests draft in every round, False if none ever does, None if the policy must
        be asked.
    """
    if policy.limits is None:
        return False
    return True if decides_nothing(policy) else None
