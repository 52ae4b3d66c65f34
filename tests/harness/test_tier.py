from __future__ import annotations

import pytest
from cost_maker import make_table
from price_maker import make_policy
from tree_maker import make_batch

from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.plain import PlainPolicy
from sgl_eagle_harness.policies.price import PriceRules
from sgl_eagle_harness.policies.tier import SpeculationTier, TierConfig, TieredPolicy

CONFIG = TierConfig(margin_tok=0.1, min_dwell_steps=3)


def choices(tier, rises, config=CONFIG):
    return [tier.choose_by_value(rise, 0.0, config) for rise in rises]


def test_first_step_takes_the_better_tier_without_margin():
    assert choices(SpeculationTier(), [0.01]) == [True]
    assert choices(SpeculationTier(), [-0.01]) == [False]
    assert choices(SpeculationTier(), [0.0]) == [False]


def test_a_change_needs_the_dwell_and_the_margin():
    tier = SpeculationTier()
    assert choices(tier, [1, -1, -1, -1, 1, 1, 1]) == [True, True, True, False, False, False, True]
    assert tier.switch_ct == 2
    tier = SpeculationTier()
    assert choices(tier, [1, 1, 1, -0.05, -0.09, -0.11]) == [True] * 5 + [False]
    assert choices(tier, [0.09] * 9) == [False] * 9


def test_noise_around_the_edge_does_not_flap():
    tier = SpeculationTier()
    choices(tier, [0.05 if step % 2 else -0.05 for step in range(100)])
    assert tier.switch_ct == 0


def test_steps_in_a_tier_may_be_counted_later():
    counted, told = SpeculationTier(), SpeculationTier()
    choices(counted, [1, 1, 1, 1])
    told.enter(True)
    told.stay(3)
    assert vars(told) == vars(counted)
    assert choices(told, [-1]) == [False]


def test_policies_without_values_are_followed_at_once():
    tier = SpeculationTier()
    assert not tier.choose(PlainPolicy(), make_batch())
    usual = Eagle2Spec(num_steps=2, topk=2, num_draft_tokens=4).build(None)
    assert tier.choose(usual, make_batch())
    assert tier.switch_ct == 1
    assert not isinstance(usual, TieredPolicy)


@pytest.mark.parametrize(("draft_us", "expected"), [(10.0, True), (900.0, False)])
def test_price_policy_is_asked_for_its_values(draft_us, expected):
    policy = make_policy(costs=make_table(draft=(draft_us, 1.0), target=(1000.0, draft_us)))
    assert isinstance(policy, TieredPolicy)
    assert SpeculationTier().choose(policy, make_batch()) is expected


def test_a_policy_that_may_not_decode_plainly_never_does():
    policy = make_policy(costs=make_table(draft=(900.0, 1.0)), rules=PriceRules(allow_plain=False))
    tier = SpeculationTier()
    assert [tier.choose(policy, make_batch()) for _ in range(20)] == [True] * 20
