"""Servers prepare the verify sizes that their policy can ask for."""

import dataclasses

import pytest

from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.policies.plain import PlainPolicy
from sgl_eagle_harness.policies.static import StaticPolicy
from sgl_eagle_harness.types import TreeLimits

pytestmark = pytest.mark.reference


@dataclasses.dataclass(frozen=True)
class UnsizedPolicy(PlainPolicy):
    """A policy that says no more than its limits."""

    num_draft_tokens: int

    @property
    def limits(self):
        return TreeLimits(num_steps=8, topk=4, num_draft_tokens=self.num_draft_tokens)


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (PlainPolicy(), (1,)),
        (StaticPolicy.chain(4), (5,)),
        (Eagle2Policy(limits=TreeLimits(num_steps=3, topk=4, num_draft_tokens=10)), (10,)),
        (UnsizedPolicy(num_draft_tokens=2), (1, 2)),
        (UnsizedPolicy(num_draft_tokens=8), (1, 2, 4, 8)),
        (UnsizedPolicy(num_draft_tokens=21), (1, 2, 4, 8, 16, 21)),
    ],
    ids=["plain", "static", "eagle2", "limit-2", "limit-8", "limit-21"],
)
def test_sizes_by_policy(policy, wanted):
    from sgl_eagle.plugin.verify_sizes import verify_sizes

    assert verify_sizes(policy) == wanted
