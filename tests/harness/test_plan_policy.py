"""A plan settles depth and size of a round from batch size, context and an average tree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cost_maker import make_grid, make_table
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_maker import DRAFTS, SIZES, make_plan, policy_of_round, shape_of
from tree_maker import RandomDrafter, make_batch

from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.errors import CostTableRangeError, PolicyConfigError
from sgl_eagle_harness.policies.confidence_order import ConfidenceOrder, confidence_order
from sgl_eagle_harness.policies.plan import ADAPTIVE_GAIN, PlanSpec, asking_gain
from sgl_eagle_harness.policies.planned import PlannedPolicy
from sgl_eagle_harness.policies.tier import SpeculationTier, TieredPolicy, choose_rows
from sgl_eagle_harness.round_shape import PLAIN_ROUND, RoundShape, choose_shape, round_shapes
from sgl_eagle_harness.types import NO_NODE, BatchContext


def context_of(*contexts, batch_size=1):
    return BatchContext(
        batch_size=batch_size,
        context_len=np.array(contexts),
        num_pending=np.ones(len(contexts), np.int64),
    )


def test_shapes_are_the_plain_round_and_every_size_that_a_depth_can_fill():
    shapes = round_shapes(num_steps=2, topk=2, sizes=(1, 2, 4, 8))
    # One level of topk 2 makes trees of at most 3 nodes, two levels of 7.
    assert shapes == (PLAIN_ROUND, RoundShape(1, 2), RoundShape(2, 2), RoundShape(2, 4))


def test_the_plan_worked_out_by_hand():
    # A pass over n tokens of one request takes 1000 + 10 n, a draft-extend 125, a step of topk
    # 3 takes 100 + 5 * 3; the engine asks nobody. Plain: 1 / 1010 tokens per microsecond, 990.1
    # a second.
    plan = make_plan()
    speed = dict(zip(plan.shapes, 1e6 * plan.shape_tok_per_us(1, 100), strict=True))
    assert speed[PLAIN_ROUND] == pytest.approx(1e6 / 1010)
    assert speed[RoundShape(1, 2)] == pytest.approx(1e6 * 1.6 / (125 + 1020))
    assert speed[RoundShape(2, 4)] == pytest.approx(1e6 * 2.1 / (125 + 115 + 1040))
    assert speed[RoundShape(3, 8)] == pytest.approx(1e6 * 2.6 / (125 + 2 * 115 + 1080))
    assert speed[RoundShape(3, 8)] == max(speed.values())  # 1811.8; 2, 8 reaches 1742.4
    assert shape_of(plan, context_of(100)) == RoundShape(3, 8)
    # 64 requests: a pass takes 1000 + 640 n, a draft-extend 120 + 5 * 64, a step 100 + 5 * 3 * 64.
    speed = dict(zip(plan.shapes, 1e6 * plan.shape_tok_per_us(64, 100), strict=True))
    assert speed[PLAIN_ROUND] == pytest.approx(1e6 * 64 / 1640)  # 39,024 tokens a second
    assert speed[RoundShape(1, 2)] == pytest.approx(1e6 * 64 * 1.6 / (440 + 2280))  # 37,647
    assert speed[RoundShape(3, 8)] == pytest.approx(1e6 * 64 * 2.6 / (440 + 2 * 1060 + 6120))
    assert shape_of(plan, context_of(100, batch_size=64)) == PLAIN_ROUND


def test_an_engine_that_does_not_draft_ahead_is_asked_after_every_level():
    ahead, waiting = make_plan(), make_plan(costs=make_table(batches=(1, 4, 64)))
    index = ahead.shapes.index(RoundShape(3, 8))
    # Two levels with a decision of 2 us each, and the choice of what to verify, 2 us.
    rise = waiting.shape_us(1, 0)[index] - ahead.shape_us(1, 0)[index]
    assert rise == pytest.approx(6.0)
    assert waiting.shape_us(1, 0)[0] == ahead.shape_us(1, 0)[0]


def test_contexts_of_one_power_of_two_share_a_plan_within_what_was_measured():
    plan = make_plan()
    assert plan.planned_context(64) == plan.planned_context(127) == 96
    assert plan.planned_context(128) == 192
    assert plan.planned_context(700) == 768
    assert plan.planned_context(1) == 1.5
    assert plan.planned_context(0) == 0.75
    late = make_table(batches=(1,))
    from_500 = replace(late.target, context_len=np.array([500, 600]))
    narrow = make_plan(costs=replace(late, target=from_500))
    assert narrow.planned_context(520) == 600
    with pytest.raises(CostTableRangeError, match="context_len"):
        shape_of(plan, context_of(1001))


@settings(deadline=None, max_examples=60)
@given(
    batch_size=st.integers(1, 64),
    context_len=st.integers(0, 1000),
    base=st.floats(1.0, 1e4),
    slope=st.floats(0.1, 1e3),
    draft=st.floats(1.0, 1e3),
)
def test_no_shape_is_predicted_to_be_faster_than_the_chosen_one(
    batch_size, context_len, base, slope, draft
):
    costs = make_table(target=(base, slope), draft=(draft, 1.0), batches=(1, 64))
    plan = make_plan(costs=replace(costs, drafts_ahead=True))
    shape = shape_of(plan, context_of(context_len, batch_size=batch_size))
    speed = plan.shape_tok_per_us(batch_size, context_len)
    assert speed[plan.shapes.index(shape)] == speed.max()
    plain = batch_size / float(costs.decode_us(batch_size, context_len))
    assert speed.max() >= plain * (1 - 1e-9)


@settings(deadline=None, max_examples=100)
@given(
    speed=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8),
    incumbent=st.integers(0, 7),
    margin=st.floats(0.0, 0.5),
)
def test_what_runs_is_replaced_only_by_what_is_better_by_the_margin(speed, incumbent, margin):
    speeds = np.array(speed)
    incumbent %= len(speed)
    chosen = choose_shape(speeds, incumbent=incumbent, margin=margin)
    if chosen != incumbent:
        assert speeds[chosen] == speeds.max() > speeds[incumbent] * (1 + margin)
    assert speeds[chosen] * (1 + margin) >= speeds.max()
    assert choose_shape(speeds, incumbent=chosen, margin=margin) == chosen


@pytest.mark.parametrize("batch_size", [1, 4])
def test_rows_are_drafted_and_verified_as_the_policy_of_their_shape_does(batch_size):
    def costs_by_context():
        # Verification is dear in long contexts.
        table = make_table(batches=(1, 64))
        grid = make_grid(
            "target", batches=(1, 64), us=lambda b, n, c: 1000.0 + 10 * b * n + 2.0 * c * n
        )
        return replace(table, target=grid, drafts_ahead=True)

    plan = make_plan(costs=costs_by_context())
    contexts = (4, 30, 120, 480, 960)
    batch = context_of(*contexts, batch_size=batch_size)
    trees = grow_trees(RandomDrafter(3, len(contexts)), plan, batch)
    columns = plan.select_verify(trees, batch)
    seen = set()
    for row, context in enumerate(contexts):
        alone = context_of(context, batch_size=batch_size)
        shape = shape_of(plan, alone)
        seen.add(shape)
        policy = policy_of_round(plan, alone)
        verified = columns[row][columns[row] != NO_NODE]
        drafted = trees.depths[trees.valid[row]].max(initial=0)
        assert plan.should_speculate(batch)[row] == (shape.num_steps > 0)
        if not shape.num_steps:
            assert policy.limits is None
            assert not len(verified)
            continue
        assert drafted == shape.num_steps
        assert len(verified) == shape.num_draft_tokens - 1
        one = grow_trees(RandomDrafter(3, len(contexts)), policy, batch)
        wanted = policy.select_verify(one, batch)[row]
        assert trees.path_log_confidence[row, verified].tolist() == pytest.approx(
            one.path_log_confidence[row, wanted].tolist()
        )
    assert len(seen) > 1


def test_the_tiers_value_is_the_plans_choice_and_is_not_damped():
    plan = make_plan()
    assert isinstance(plan, TieredPolicy)
    assert isinstance(plan, PlannedPolicy)
    tier = SpeculationTier()
    for batch_size in (1, 64, 1, 64):
        batch = make_batch(1, batch_size=batch_size)
        wanted = plan.should_speculate(batch).tolist()
        assert choose_rows(plan, batch, [tier]).tolist() == wanted
        assert max(float(value[0]) for value in plan.tier_values(batch)) == pytest.approx(0.0)
    assert tier.switch_ct == 3


def test_asking_pays_where_decisions_are_cheap_against_a_round():
    def gain(decide_us, **changes):
        table = replace(make_table(decide_us=decide_us, batches=(1, 64)), drafts_ahead=True)
        return asking_gain(make_plan(costs=table, **changes), batch_size=1, context_len=100)

    # A round of 3, 8 takes 1435 us. Asked at no cost, it still waits for the step that runs when it
    # stops, 100 + 5 * 32 us at full width: 1.04 * 1435 / 1695 - 1 = -12 %.
    assert gain(0.0) == pytest.approx((1 + ADAPTIVE_GAIN) * 1435 / 1695 - 1)
    # No decision hides behind a step: two levels wait for one each, and so does the stop, which
    # then waits for 160 us more of the step that runs in vain.
    assert gain(100.0) == pytest.approx((1 + ADAPTIVE_GAIN) * 1435 / (1695 + 2 * 100) - 1)
    assert gain(500.0) < gain(300.0) < gain(100.0) < 0
    slow = replace(
        make_table(target=(10_000.0, 10.0), decide_us=50.0, batches=(1, 64)), drafts_ahead=True
    )
    assert asking_gain(make_plan(costs=slow), batch_size=1, context_len=100) > 0
    # Where nothing is drafted, asking neither costs nor brings anything.
    dear = replace(make_table(target=(10.0, 1e4)), drafts_ahead=True)
    assert asking_gain(make_plan(costs=dear), batch_size=1, context_len=100) == 0


def test_it_keeps_the_order_of_confidence():
    assert confidence_order(make_plan()) == ConfidenceOrder(num_certain_steps=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verify_sizes": (2, 4)}, r"verify_sizes must rise from 1 .* got \[2, 4\]"),
        ({"expected_drafts": DRAFTS[:2]}, r"must be 3 rows \(num_steps\) of 4 numbers .*\[4, 4\]"),
        (
            {"expected_drafts": (*DRAFTS[:2], (0.0, 0.6, 1.2, 3.5))},
            r"expected_drafts after 3 levels must be in \[0, 3\], got \[0.0, 0.6, 1.2, 3.5\]",
        ),
        (
            {"topk": 32, "costs": replace(make_table(), draft=make_grid("draft", tokens=(1, 8)))},
            r"topk must be in the cost table's range \[1, 8\], got 1 to 32",
        ),
    ],
)
def test_parameters_out_of_range_are_refused(changes, message):
    with pytest.raises(PolicyConfigError, match=message):
        make_plan(**changes)


def test_a_stored_plan_is_the_same_plan():
    plan = make_plan()
    spec = PlanSpec(num_steps=3, topk=3, verify_sizes=SIZES, expected_drafts=DRAFTS)
    found = PlanSpec.model_validate_json(spec.model_dump_json()).build(plan.costs)
    assert found.name == "plan-3-3-8"
    assert shape_of(found, context_of(100)) == shape_of(plan, context_of(100))
    with pytest.raises(PolicyConfigError, match="a plan needs a cost table"):
        spec.build(None)
