"""What is left to ask a policy for where draft steps run ahead of decisions."""

from dataclasses import replace

import pytest
from cost_maker import make_table
from plan_maker import make_plan
from price_maker import make_policy

from sgl_eagle_harness.calibration import IdentityMap
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.policies.online_plan import OnlinePlanPolicy
from sgl_eagle_harness.policies.online_price import OnlinePricePolicy
from sgl_eagle_harness.policies.open_decisions import (
    OpenDecisions,
    decides_nothing,
    may_decide_nothing,
    open_decisions,
    settled_tier,
)
from sgl_eagle_harness.policies.plain import PlainPolicy
from sgl_eagle_harness.policies.price import PriceRules
from sgl_eagle_harness.policies.static import EAGLE1_PATHS, StaticPolicy
from sgl_eagle_harness.types import TreeLimits

ALL = OpenDecisions(num_certain_steps=0, chooses_tree=True)
EAGLE2 = Eagle2Policy(limits=TreeLimits(num_steps=5, topk=4, num_draft_tokens=8))
BY_RANK = StaticPolicy(name="eagle1", paths=EAGLE1_PATHS)


@pytest.mark.parametrize(
    ("policy", "num_steps"),
    [
        (EAGLE2, 5),
        (StaticPolicy.chain(3), 3),
        (make_plan(), 3),
        (OnlinePlanPolicy(make_plan(), IdentityMap(), batch_edges=(1,)), 3),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_trees_that_follow_from_confidence_leave_nothing(policy, num_steps):
    nothing = OpenDecisions(num_certain_steps=num_steps - 1, chooses_tree=False)
    assert open_decisions(policy) == nothing


def test_the_price_rule_leaves_what_its_rules_decide():
    assert open_decisions(make_policy()) == ALL
    unasked = make_policy(widths=(3,), rules=PriceRules(stop=False))
    assert open_decisions(unasked) == OpenDecisions(num_certain_steps=3, chooses_tree=True)


def test_it_may_depend_on_the_batch():
    costs = make_table(draft=(20.0, 10.0), decide_us=500.0, batches=(1, 64))
    prior = make_policy(
        costs=replace(costs, drafts_ahead=True), widths=(3,), rules=PriceRules(adapt_width=False)
    )
    policy = OnlinePricePolicy(prior, typical_context=100, batch_edges=(1,))
    assert open_decisions(policy) == ALL
    assert open_decisions(policy, 64) == ALL
    assert open_decisions(policy, 1) == OpenDecisions(num_certain_steps=3, chooses_tree=True)


def test_shapes_that_go_by_rank_promise_nothing():
    assert open_decisions(BY_RANK) == ALL


@pytest.mark.parametrize(
    ("policy", "every_round", "some_rounds", "tier"),
    [
        (EAGLE2, True, True, True),
        (StaticPolicy.chain(3), True, True, True),
        (make_plan(), False, True, None),  # it decides before a round
        (BY_RANK, False, False, None),
        (make_policy(), False, False, None),
        (PlainPolicy(), False, False, False),  # it has no rounds that draft
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_rounds_that_nobody_is_asked_in(policy, every_round, some_rounds, tier):
    assert decides_nothing(policy) == every_round
    assert may_decide_nothing(policy) == some_rounds
    assert settled_tier(policy) is tier
