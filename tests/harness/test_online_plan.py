"""The plan of a running server: a look-up that learns."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from cost_maker import make_table
from plan_maker import DRAFTS, SIZES, make_plan, policy_of_round, shape_of
from tree_maker import make_batch

from sgl_eagle_harness.calibration import IdentityMap
from sgl_eagle_harness.policies.learning import (
    REFRESH_STEPS,
    SLOWEST_PACE,
    STEPS_TO_SETTLE,
    LearningPolicy,
    VerifiedRows,
)
from sgl_eagle_harness.policies.online_plan import (
    DOUBT,
    MARGIN,
    TRIAL_ROUNDS,
    TRIAL_SHARE,
    OnlinePlanPolicy,
)
from sgl_eagle_harness.policies.plan import PlanPolicy
from sgl_eagle_harness.policies.planned import PlannedPolicy
from sgl_eagle_harness.round_shape import PLAIN_ROUND, RoundShape

REFRESH = 8
DEEP = RoundShape(3, 8)


def make_online(plan: PlanPolicy | None = None) -> OnlinePlanPolicy:
    return OnlinePlanPolicy(
        plan or make_plan(), IdentityMap(), batch_edges=(1, 4, 16), refresh_steps=REFRESH
    )


def step(shape, *, num_rows=1, correct=2, elapsed_us=None) -> VerifiedRows:
    return VerifiedRows.of_rows(
        batch_size=num_rows,
        elapsed_us=elapsed_us,
        depths=np.full(num_rows, shape.num_steps),
        num_draft_tokens=np.full(num_rows, shape.num_draft_tokens),
        num_correct_drafts=np.full(num_rows, correct if shape.num_steps else 0),
    )


def as_promised(shape, index):
    """Drafts kept in one of many rounds, on average those of the prior's tree."""
    column = SIZES.index(shape.num_draft_tokens)
    levels = np.diff([0.0, *(row[column] for row in DRAFTS[: shape.num_steps])])
    return int((index * 0.618 % 1 < levels).sum())


def serve(online, *, num_rounds, batch_size=1, correct=None, us_of=None):
    """Shapes of so many rounds whose outcomes the policy is told."""
    shapes = []
    for index in range(num_rounds):
        shape = shape_of(online, make_batch(batch_size, batch_size=batch_size))
        shapes.append(shape)
        elapsed_us = None if us_of is None else us_of(shape)
        kept = as_promised(shape, index) if correct is None else correct
        online.observe_step(step(shape, num_rows=batch_size, correct=kept, elapsed_us=elapsed_us))
    return shapes


def test_it_starts_at_the_tables_best_at_every_batch_size_and_follows_it_at_once():
    online, plan = make_online(), make_plan()
    assert isinstance(online, PlannedPolicy)
    assert isinstance(online, LearningPolicy)
    assert online.name == "online-plan-3-3-8"
    for batch_size in (1, 64, 1, 64, 4):
        batch = make_batch(batch_size, batch_size=batch_size)
        assert shape_of(online, batch) == shape_of(plan, batch)
    assert online.running_shape == DEEP


def test_rounds_of_a_shape_are_those_of_a_policy_that_decides_nothing():
    online = make_online()
    one, many = make_batch(1), make_batch(64, batch_size=64)
    assert policy_of_round(online, one).name == "eagle2-3-3-8"
    assert policy_of_round(online, many).name == "plain"
    assert policy_of_round(online, one) is policy_of_round(online, one)


def test_a_shape_that_is_nearly_as_good_keeps_running():
    # Two shapes whose order changes by less than the margin between two batch sizes.
    plan = make_plan()
    index = {shape: place for place, shape in enumerate(plan.shapes)}
    speed = {batch: plan.shape_tok_per_us(batch, 100) for batch in (4, 5)}
    best = {batch: plan.shapes[int(speed[batch].argmax())] for batch in speed}
    assert best[4] != best[5]
    loss = 1 - speed[5][index[best[4]]] / speed[5].max()
    online = make_online()
    batches = {batch: make_batch(batch, batch_size=batch) for batch in speed}
    shapes = [shape_of(online, batches[batch]) for batch in (4, 5, 4, 5)]
    assert (len(set(shapes)) == 1) == (loss < MARGIN)
    assert loss < MARGIN


def test_drafts_that_fail_end_speculation_and_what_is_learnt_wears_off():
    online = make_online()
    start = online.price_tok_per_us(1)
    shapes = serve(online, num_rounds=40 * REFRESH, correct=0)
    assert shapes[0] == DEEP
    assert shapes[-1] == PLAIN_ROUND
    assert online.yield_ratio < 0.7
    assert online.price_tok_per_us(1) < start
    shapes = serve(online, num_rounds=30_000 // REFRESH * REFRESH)
    assert shapes[-1] == DEEP


def observe_failing_trees(online, num_steps):
    depths = np.array([1, 1, 2, 3])
    logs = np.log(np.array([0.2, 0.1, 0.02, 0.01])).astype(np.float32)
    for _ in range(num_steps):
        online.observe_nodes(depths, logs, np.zeros(4))
        online.observe_step(step(DEEP, correct=0))


def rounds_until_another_plan(online):
    """How many begin before new estimates are in force, that one included."""
    before, batch = online.plan, make_batch(1)
    for num_rounds in range(1, REFRESH + 1):
        shape_of(online, batch)
        if online.plan is not before:
            return num_rounds
    raise AssertionError("no refresh")


def test_estimates_change_at_a_refresh_and_never_between():
    online = make_online()
    before = online.plan
    observe_failing_trees(online, REFRESH - 1)
    shape_of(online, make_batch(1))
    assert online.plan is before
    assert online.num_observed_nodes == 0
    observe_failing_trees(online, 1)
    rounds_until_another_plan(online)
    assert online.num_observed_nodes == 4 * REFRESH
    drafts, prior = np.array(online.plan.expected_drafts), np.array(before.expected_drafts)
    assert (drafts[:, 1:] < prior[:, 1:]).all()


def test_a_refresh_is_spread_over_rounds():
    online = make_online()
    observe_failing_trees(online, REFRESH)
    assert rounds_until_another_plan(online) >= 4
    refreshed = online.plan
    for _ in range(10):
        shape_of(online, make_batch(1))
    assert online.plan is refreshed


def test_a_refresh_that_is_due_does_not_drop_the_one_before():
    apart, together = make_online(), make_online()
    for _ in range(2):
        observe_failing_trees(apart, REFRESH)
        rounds_until_another_plan(apart)
    observe_failing_trees(together, 2 * REFRESH)
    rounds_until_another_plan(together)
    assert together.plan.expected_drafts == apart.plan.expected_drafts
    assert together.num_observed_nodes == apart.num_observed_nodes


def test_a_shape_that_takes_longer_than_the_table_says_is_left():
    def us_of(shape):
        us = float(make_plan().shape_us(1, 100)[make_plan().shapes.index(shape)])
        return 1.8 * us if shape == DEEP else us

    shapes = serve(make_online(), num_rounds=400 * REFRESH, us_of=us_of)
    assert shapes[0] == DEEP
    assert DEEP not in shapes[-REFRESH:]
    assert shapes[-1].num_steps == 2


def test_a_table_that_is_wrong_by_the_same_factor_everywhere_changes_nothing():
    def us_of(shape):
        return 0.6 * float(make_plan().shape_us(1, 100)[make_plan().shapes.index(shape)])

    online = make_online()
    start = online.price_tok_per_us(1)
    shapes = serve(online, num_rounds=200 * REFRESH, us_of=us_of)
    tried = [shape for shape in shapes if shape != DEEP]
    assert len(tried) <= 0.1 * len(shapes)
    assert online.price_tok_per_us(1) > 1.3 * start


@pytest.mark.parametrize("seed", range(4))
def test_a_machine_that_is_busy_for_a_while_changes_no_choice(seed):
    plan, rng = make_plan(), np.random.default_rng(seed)
    us = dict(zip(plan.shapes, plan.shape_us(1, 100), strict=True))
    online, slow = make_online(), itertools.repeat(1.0)

    def us_of(shape):
        return next(slow) * us[shape]

    serve(online, num_rounds=20 * REFRESH, us_of=us_of)
    # As while other programs share the device: for some rounds more, for some less.
    slow = (each for each in 3 * rng.lognormal(0, 0.7, 40) for _ in range(15))
    serve(online, num_rounds=600, us_of=us_of)
    slow = itertools.repeat(1.0)
    shapes = serve(online, num_rounds=100 * REFRESH, us_of=us_of)
    assert shapes.count(DEEP) >= 0.95 * len(shapes)


def test_a_window_that_one_plain_round_catches_up_makes_no_plain_round_look_fast():
    # Shapes take turns and take what the table says; a plain round in 16 takes the catch-up of all.
    costs = replace(make_table(), drafts_ahead=True, extends_every_step=True)
    drafts = ((0.0, 0.8), (0.0, 1.6))
    plan = make_plan(num_steps=2, verify_sizes=(1, 4), expected_drafts=drafts, costs=costs)
    tree, window = RoundShape(2, 4), 16
    us = dict(zip(plan.shapes, plan.shape_us(1, 100), strict=True))
    alone_us = float(costs.target.at(1, 1, 100))
    catch_up_us = window * (us[PLAIN_ROUND] - alone_us)
    assert catch_up_us > alone_us / 10
    online = make_online(plan)
    shape_of(online, make_batch(1))  # says how long texts are
    for _ in range(64):
        for index in range(window):
            elapsed_us = alone_us + (catch_up_us if index == window - 1 else 0.0)
            online.observe_step(step(PLAIN_ROUND, elapsed_us=elapsed_us))
        for _ in range(window):
            online.observe_step(step(tree, correct=0, elapsed_us=us[tree]))
    shares = dict(zip(plan.shapes, online.shape_us(1, 100) / plan.shape_us(1, 100), strict=True))
    assert shares[tree] == pytest.approx(shares[PLAIN_ROUND], rel=0.005)


@pytest.mark.parametrize("is_close", [True, False])
def test_trials_are_few_and_only_of_shapes_that_are_close(is_close):
    # With a size of 2 alone, one level is as good as two but for a draft step.
    draft = 5.0 if is_close else 500.0
    costs = replace(make_table(draft=(draft, 0.0)), drafts_ahead=True)
    plan = make_plan(
        num_steps=2, verify_sizes=(1, 2), expected_drafts=((0.0, 0.8), (0.0, 0.8)), costs=costs
    )
    shapes = serve(make_online(plan), num_rounds=4000, correct=1)
    tried = [shape for shape in shapes if shape != RoundShape(1, 2)]
    # Nothing is learnt of a time, so that each round may lose all that is doubted.
    most = 4000 * TRIAL_SHARE / DOUBT
    assert most / 2 - TRIAL_ROUNDS < len(tried) <= most if is_close else not tried
    assert set(tried) <= {RoundShape(2, 2)}


def test_trials_of_what_is_worse_than_predicted_cost_little_time():
    # 64 requests: a plain round takes 1640 us, one of 2, 4 takes 5060 and is predicted at 0.84 of
    # plain decoding; it really takes 1.25 times as long and is at 0.67.
    plan = make_plan(num_steps=2, verify_sizes=(1, 4), expected_drafts=((0.0, 0.8), (0.0, 1.6)))
    tree = RoundShape(2, 4)
    us = dict(zip(plan.shapes, plan.shape_us(64, 100), strict=True))
    speed = dict(zip(plan.shapes, plan.shape_tok_per_us(64, 100), strict=True))
    assert (us[PLAIN_ROUND], us[tree]) == pytest.approx((1640.0, 5060.0))
    assert speed[tree] / speed[PLAIN_ROUND] == pytest.approx(0.843, abs=1e-3)
    us[tree] *= 1.25
    online = OnlinePlanPolicy(plan, IdentityMap(), batch_edges=(1, 2, 4, 8, 16, 32, 64))
    correct = np.repeat([1, 2], (26, 38))  # 1.6 a request
    num_tokens, shapes = 0, []
    for _ in range(20_000):
        shape = shape_of(online, make_batch(64, batch_size=64))
        shapes.append(shape)
        found = correct if shape == tree else np.zeros(64, np.int64)
        num_tokens += 64 + int(found.sum())
        online.observe_step(
            VerifiedRows.of_rows(
                batch_size=64,
                elapsed_us=us[shape],
                depths=np.full(64, shape.num_steps),
                num_draft_tokens=np.full(64, shape.num_draft_tokens),
                num_correct_drafts=found,
            )
        )
    reached = num_tokens / sum(us[shape] for shape in shapes)
    assert shapes.count(tree) >= TRIAL_ROUNDS
    # Four such rounds may cost 4 * 5060 / 1640 * (1 - 0.8 * 0.843) = 4.02 plain ones.
    assert tree not in shapes[: int(4.02 / TRIAL_SHARE)]
    assert set(shapes) == {PLAIN_ROUND, tree}
    assert 1 - TRIAL_SHARE < reached / speed[PLAIN_ROUND] < 1


def test_what_is_known_well_is_learnt_rarely_and_a_new_range_of_batch_sizes_often():
    online = OnlinePlanPolicy(make_plan(), IdentityMap(), batch_edges=(1, 4, 16))
    refreshed = []
    for index in range(SLOWEST_PACE * STEPS_TO_SETTLE + 3000):
        before = online.num_refreshes
        serve(online, num_rounds=1, batch_size=1)
        if online.num_refreshes > before:
            refreshed.append(index)
    gaps = np.diff(refreshed).tolist()
    assert all(gap == REFRESH_STEPS for gap in gaps[1:6])
    assert gaps[-2:] == [SLOWEST_PACE * REFRESH_STEPS] * 2
    before = online.num_refreshes
    serve(online, num_rounds=4 * REFRESH_STEPS, batch_size=64)
    assert online.num_refreshes - before >= 4
