"""Plans for tests."""

from __future__ import annotations

from dataclasses import replace

from cost_maker import make_table

from sgl_eagle_harness.policies.plan import PlanPolicy
from sgl_eagle_harness.policies.planned import mean_length, plans

SIZES = (1, 2, 4, 8)
DRAFTS = ((0.0, 0.6, 0.8, 0.8), (0.0, 0.6, 1.1, 1.3), (0.0, 0.6, 1.2, 1.6))


def shape_of(plan, batch):
    """The shape of the next round of a batch."""
    return plan.round_shape(batch.batch_size, mean_length(batch.context_len.tolist()))


def make_plan(**changes) -> PlanPolicy:
    fields = {
        "num_steps": 3,
        "topk": 3,
        "verify_sizes": SIZES,
        "expected_drafts": DRAFTS,
        "costs": replace(make_table(batches=(1, 4, 64)), drafts_ahead=True),
    }
    return PlanPolicy(**(fields | changes))


def policy_of_round(policy, batch):
    """The policy that a server would ask in the next round: the policy itself unless it plans."""
    return policy.policy_of(shape_of(policy, batch)) if plans(policy) else policy
