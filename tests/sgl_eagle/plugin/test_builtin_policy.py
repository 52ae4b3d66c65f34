"""The policy of a server without a policy file."""

from dataclasses import replace

import numpy as np
import pytest
from fake_server import FakeServer, measure

from sgl_eagle.plugin.builtin_policy import (
    LEAST_ASKING_GAIN,
    UnmeasuredPolicy,
    builtin_plan,
    builtin_sizes,
    choose_builtin,
    load_prior,
)
from sgl_eagle.plugin.profile_grid import ProfileGrid
from sgl_eagle_harness.errors import CalibrationError
from sgl_eagle_harness.policies.learning import LearningPolicy
from sgl_eagle_harness.policies.plan import asking_gain
from sgl_eagle_harness.policies.planned import PlannedPolicy
from sgl_eagle_harness.round_shape import PLAIN_ROUND
from sgl_eagle_harness.types import BatchContext, TreeLimits

LIMITS = TreeLimits(num_steps=5, topk=4, num_draft_tokens=12)


@pytest.fixture
def costs():
    grid = ProfileGrid(
        batch_sizes=(1, 8), num_tokens=builtin_sizes(LIMITS), context_lens=(1, 512), width=4
    )
    table, _ = measure(FakeServer(), grid=grid)
    return replace(table, decide_us=5.0, verify_select_us=5.0)


def make_batch(batch_size):
    ones = np.ones(batch_size, np.int64)
    return BatchContext(batch_size=batch_size, context_len=100 * ones, num_pending=ones)


@pytest.mark.parametrize(
    ("largest", "sizes"), [(2, (1, 2)), (12, (1, 2, 4, 8, 12)), (16, (1, 2, 4, 8, 16))]
)
def test_sizes_are_powers_of_two_and_the_limit(largest, sizes):
    limits = TreeLimits(num_steps=5, topk=4, num_draft_tokens=largest)
    assert builtin_sizes(limits) == sizes
    assert UnmeasuredPolicy(limits=limits).verify_sizes == sizes


def test_the_shipped_prior_is_a_fit_and_serves_every_branching():
    prior = load_prior()
    assert prior.num_positions > 1000
    assert len(prior.workloads) == 5
    assert [prior.continuation_for(topk).topk for topk in (2, 3, 4, 8, 10)] == [2, 4, 4, 8, 8]
    for model in prior.continuations:
        assert len(model.ranked_probs) == len(model.ratios)


def test_decisions_that_take_as_long_as_drafts_leave_a_plan(costs):
    dear = replace(costs, decide_us=float(costs.draft_step_us(1, 4, 1)))
    choice = choose_builtin(LIMITS, dear, load_prior(), largest_batch=8)
    assert choice.asking_gain <= 0
    policy = choice.policy
    assert policy.name == "online-plan-5-4-12"
    assert isinstance(policy, PlannedPolicy)
    assert isinstance(policy, LearningPolicy)
    assert policy.limits == LIMITS
    assert policy.round_shape(1, 100.0).num_steps > 1
    assert policy.verify_sizes == builtin_sizes(LIMITS)


def test_a_gain_that_a_busy_host_would_eat_leaves_a_plan(costs):
    # Decisions of 2 % of a round each bring 4 %.
    target = replace(costs.target, us=costs.target.us + 1e6)
    costs = replace(costs, target=target, decide_us=4e3)
    choice = choose_builtin(LIMITS, costs, load_prior(), largest_batch=8)
    assert 0 < choice.asking_gain < LEAST_ASKING_GAIN
    assert choice.policy.name == "online-plan-5-4-12"


def test_it_starts_at_the_price_of_its_costs_and_adapts_to_the_batch(costs):
    # A slow target: a draft step that ran in vain does not matter.
    slow = replace(costs.target, us=costs.target.us + 1e6)
    costs = replace(costs, target=slow)
    choice = choose_builtin(LIMITS, costs, load_prior(), largest_batch=8)
    plan = builtin_plan(LIMITS, costs, load_prior())
    gain = asking_gain(plan, batch_size=1, context_len=choice.context_len)
    assert LEAST_ASKING_GAIN < choice.asking_gain == gain
    policy = choice.policy
    assert policy.name == "online-price-5-4-12"
    assert policy.limits == LIMITS
    plain = 8 / float(costs.decode_us(8, 256))
    assert policy.price_tok_per_us(8) > plain
    assert policy.price_tok_per_us(8) > policy.price_tok_per_us(1)
    assert policy.should_speculate(make_batch(8)).all()


def test_where_verification_is_dear_it_decodes_plainly(costs):
    steep = replace(costs.target, us=costs.target.us * costs.target.num_tokens[None, :, None] ** 2)
    costs = replace(costs, target=steep)
    policy = choose_builtin(LIMITS, costs, load_prior(), largest_batch=8).policy
    assert policy.round_shape(1, 100.0) == PLAIN_ROUND


def test_a_damaged_prior_names_its_file(tmp_path):
    (tmp_path / "prior.json").write_text('{"schema_version": 1}')
    with pytest.raises(CalibrationError, match=r"prior\.json: target: Field required"):
        load_prior(tmp_path / "prior.json")
