"""Price, yield and map of a running server."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cost_maker import make_table
from price_maker import make_policy
from tree_maker import RandomDrafter, make_batch

from sgl_eagle_harness.continuation import ContinuationModel
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.errors import PolicyConfigError
from sgl_eagle_harness.plan_throughput import PlanThroughput, plan_throughput
from sgl_eagle_harness.policies.learning import VerifiedRows
from sgl_eagle_harness.policies.online_price import OnlinePricePolicy, scale_yield
from sgl_eagle_harness.policies.tier import SpeculationTier, TieredPolicy, choose_rows
from sgl_eagle_harness.price_tracker import HIGHEST_RATIO, PriceTracker
from sgl_eagle_harness.root_forecast import forecast_from_root

RANKED = ContinuationModel(
    prob_edges=(),
    ratios=(((0.6, 0.2, 0.1),),) * 4,
    ranked_probs=tuple(tuple(0.7 * 0.6**rank for rank in range(12)) for _ in range(4)),
)


def make_online(**changes) -> OnlinePricePolicy:
    policy = make_policy(continuation=RANKED, **changes)
    return OnlinePricePolicy(policy, typical_context=100, batch_edges=(1, 4, 16))


def step(num_rows=1, *, elapsed_us=1000.0, depth=3, size=8, correct=2) -> VerifiedRows:
    return VerifiedRows.of_rows(
        batch_size=num_rows,
        elapsed_us=elapsed_us,
        depths=np.full(num_rows, depth),
        num_draft_tokens=np.full(num_rows, size),
        num_correct_drafts=np.full(num_rows, correct),
    )


def solve_with(costs, batch_size=1):
    return plan_throughput(
        costs,
        RANKED,
        num_steps=4,
        topk=3,
        sizes=(1, 2, 4, 8),
        batch_size=batch_size,
        context_len=100,
    )


def test_plan_throughput_worked_out_by_hand():
    # One level and one draft: 1.7 tokens for extend 125, select 2 and verify 1020.
    costs = make_table(target=(1000.0, 10.0), draft=(10_000.0, 0.0), extend=(120.0, 5.0))
    found = plan_throughput(
        costs, RANKED, num_steps=4, topk=3, sizes=(1, 2), batch_size=1, context_len=100
    )
    assert found.plain_tok_per_us == pytest.approx(1 / 1010)
    assert found.best_tok_per_us == pytest.approx(1.7 / (125 + 2 + 1020))


def test_plain_decoding_wins_where_verification_is_dear():
    found = solve_with(make_table(target=(10.0, 1000.0)))
    assert found.best_tok_per_us == found.plain_tok_per_us


def test_an_extend_that_ends_every_step_is_part_of_both_plans():
    costs = make_table(target=(1000.0, 0.0), draft=(10_000.0, 0.0), extend=(120.0, 5.0))
    found = plan_throughput(
        replace(costs, extends_every_step=True),
        RANKED,
        num_steps=1,
        topk=3,
        sizes=(1, 2),
        batch_size=1,
        context_len=100,
    )
    assert found.plain_tok_per_us == pytest.approx(1 / 1125)
    assert found.best_tok_per_us == pytest.approx(1.7 / (2 + 1000 + 130))


def make_tracker(**changes) -> PriceTracker:
    fields = {"batch_edges": (1, 8), "prior_us": 1000.0, "half_life_us": 1e5} | changes
    return PriceTracker(
        lambda batch: PlanThroughput(plain_tok_per_us=0.1 * batch, best_tok_per_us=0.2 * batch),
        **fields,
    )


def test_the_price_starts_at_the_solved_one_and_follows_slowly():
    tracker = make_tracker()
    assert tracker.price_tok_per_us(4) == pytest.approx(0.8)
    tracker.observe(4, num_tokens=600, elapsed_us=1000.0)
    assert tracker.price_tok_per_us(4) == pytest.approx(0.8 * (1000 + 750) / 2000, rel=0.01)
    # Batch sizes of the same range share the correction, those of another do not.
    assert tracker.price_tok_per_us(7) == pytest.approx(1.4 * 0.875, rel=0.01)
    assert tracker.price_tok_per_us(8) == pytest.approx(1.6)


def test_the_price_stays_within_its_bounds():
    tracker = make_tracker()
    for _ in range(300):
        tracker.observe(2, num_tokens=0, elapsed_us=1000.0)
    assert tracker.price_tok_per_us(2) == pytest.approx(0.2)  # plain decoding's throughput
    for _ in range(3000):
        tracker.observe(2, num_tokens=5000, elapsed_us=1000.0)
    assert tracker.price_tok_per_us(2) == pytest.approx(0.4 * HIGHEST_RATIO)
    with pytest.raises(PolicyConfigError, match=r"batch_edges must rise from 1, got \[2, 4\]"):
        make_tracker(batch_edges=(2, 4))


def test_before_any_step_it_decides_as_the_price_policy_does():
    online = make_online()
    fixed = replace(
        make_policy(continuation=RANKED),
        price_tok_per_us=solve_with(fixed_costs(), 4).best_tok_per_us,
    )
    batch = make_batch(num_rows=6, batch_size=4)
    trees = {
        name: grow_trees(RandomDrafter(5, 6), policy, batch)
        for name, policy in (("online", online), ("fixed", fixed))
    }
    assert trees["online"].num_nodes == trees["fixed"].num_nodes
    columns = online.select_verify(trees["online"], batch)
    assert np.array_equal(columns, fixed.select_verify(trees["fixed"], batch))
    assert online.name == "online-price-4-3-8"
    assert isinstance(online, TieredPolicy)


def fixed_costs():
    return make_table(batches=(1, 4, 16))


def test_estimates_change_at_a_refresh_and_never_between():
    online = OnlinePricePolicy(
        make_policy(continuation=RANKED), typical_context=100, batch_edges=(1,), refresh_steps=3
    )
    before = online.at(1)
    online.observe_nodes(np.full(200, 1), np.full(200, -0.1, np.float32), np.zeros(200))
    for _ in range(2):
        online.observe_step(step())
        assert online.at(1) is before
    online.observe_step(step())
    after = online.at(1)
    logs = np.full((1, 1), -0.1, np.float32)
    arguments = (logs, logs, np.ones(1, np.int64), np.zeros(1, np.int64), np.full((1, 1), -1))
    assert after.calibration.accept_probs(*arguments) < before.calibration.accept_probs(*arguments)
    assert online.num_observed_nodes == 200


def test_a_server_whose_drafts_fail_gives_up_and_tries_again():
    online = make_online()
    batch = make_batch(num_pending=1)
    tier = SpeculationTier()
    assert choose_rows(online, batch, [tier]).all()
    for _ in range(1024):
        online.observe_step(step(correct=0, elapsed_us=None))
    assert online.yield_ratio < 0.2
    assert not [choose_rows(online, batch, [tier])[0] for _ in range(9)][-1]
    # Plain steps carry no news about drafts; they let the old news fade.
    for _ in range(64 * 1024):
        online.observe_step(step(depth=0, size=1, correct=0, elapsed_us=None))
    assert online.yield_ratio > 0.9
    assert choose_rows(online, batch, [SpeculationTier()]).all()


@pytest.mark.parametrize("topk", [3, 2])
def test_the_yield_scales_what_is_forecast_before_drafting(topk):
    # With topk 3 the averages serve; with 2 the forecast goes level by level from the root.
    expected = {
        ratio: forecast_from_root(
            scale_yield(RANKED, ratio), num_steps=2, topk=topk, width=topk, sizes=np.array([2, 8])
        )
        for ratio in (0.5, 1.0, 99.0)
    }
    assert expected[0.5] == pytest.approx(expected[1.0] / 2, rel=1e-5)
    assert (expected[99.0][:, 0] <= 1).all()
    assert scale_yield(RANKED, 0.5).ratios[1:] == RANKED.ratios[1:]


def test_prefill_between_two_steps_does_not_count_as_decoding_time():
    slow, untimed = make_online(), make_online()
    for _ in range(128):
        slow.observe_step(step(elapsed_us=1e6))
        untimed.observe_step(step(elapsed_us=None))
    start = make_online().price_tok_per_us(1)
    assert slow.price_tok_per_us(1) < 0.9 * start
    assert untimed.price_tok_per_us(1) > 0.9 * start
