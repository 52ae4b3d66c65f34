from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from calibration_maker import make_continuation, some_maps
from cost_maker import make_table
from hypothesis import given, settings
from hypothesis import strategies as st
from price_maker import make_policy
from tree_maker import RandomDrafter, assert_closed_under_parents, make_batch

from sgl_eagle_harness.continuation import forecast_children
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.early_stop import choose_width, forecast_gain, merge_best, size_values
from sgl_eagle_harness.errors import CostTableRangeError, PolicyConfigError, TreeLimitsError
from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.price import PriceRules
from sgl_eagle_harness.types import NO_NODE, BatchContext, CandidateTrees

ALL_OFF = PriceRules(prune=False, stop=False, adapt_width=False, allow_plain=False)
prices = st.sampled_from([0.0, 1 / 20_000, 1 / 2000, 1 / 900, 1 / 300, 1 / 60])


def accept_probs(policy, trees):
    return policy.calibration.accept_probs(
        trees.path_log_confidence, trees.step_log_probs, trees.depths, trees.ranks, trees.parents
    )


def closed_subsets(parents, valid, size):
    nodes = np.flatnonzero(valid)
    for subset in itertools.combinations(nodes, size):
        if all(parents[node] == NO_NODE or parents[node] in subset for node in subset):
            yield subset


@given(seed=st.integers(0, 3000), price=prices, which=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_pruning_finds_the_best_subtree_of_any_verify_size(seed, price, which):
    policy = make_policy(
        num_steps=3,
        topk=2,
        widths=(1, 2),
        verify_sizes=(1, 2, 4, 5),
        price_tok_per_us=price,
        calibration=some_maps()[which],
    )
    batch = make_batch(2, context_len=300)
    trees = grow_trees(RandomDrafter(seed, 2), policy, batch)
    columns = policy.select_verify(trees, batch)
    assert_closed_under_parents(trees, columns)
    probs = accept_probs(policy, trees)
    for row in range(2):
        best = -np.inf
        for size in policy.verify_sizes:
            cost = price * float(policy.costs.verify_us(1, size, 300))
            for count in range(size):
                for subset in closed_subsets(trees.parents[row], trees.valid[row], count):
                    best = max(best, probs[row, list(subset)].sum() - cost)
        chosen = columns[row][columns[row] != NO_NODE]
        size = next(s for s in policy.verify_sizes if s > len(chosen))
        value = probs[row, chosen].sum() - price * float(policy.costs.verify_us(1, size, 300))
        assert value == pytest.approx(best, abs=1e-5)


def naive_value(probs, policy, price):
    ordered = sorted(probs, reverse=True)
    return max(
        sum(ordered[: size - 1]) - price * float(policy.costs.verify_us(1, size, 100))
        for size in policy.verify_sizes
    )


@given(seed=st.integers(0, 3000), price=prices, levels=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_frontier_is_the_forecasts_best_width_by_brute_force(seed, price, levels):
    policy = make_policy(price_tok_per_us=price)
    eager = make_policy(price_tok_per_us=price, rules=ALL_OFF)
    batch = make_batch(1)
    drafter = RandomDrafter(seed, 1)
    trees = CandidateTrees.empty(1).append(np.full((1, 1), -1), drafter.expand_root(3))
    for _ in range(levels - 1):
        frontier = eager.select_frontier(trees, batch)
        trees = trees.append(frontier, drafter.expand(frontier, 3))
    found = policy.select_frontier(trees, batch)[0]
    probs = accept_probs(policy, trees)[0]
    now = naive_value(probs, policy, price)
    last = np.arange(trees.num_nodes)[trees.last_level]
    order = last[np.argsort(-trees.path_log_confidence[0, last], kind="stable")]
    nets = {}
    for width in policy.widths:
        children = forecast_children(
            policy.continuation.as_array()[..., :3],
            np.array(policy.continuation.prob_edges),
            levels,
            probs[order[:width]],
        )
        step = float(policy.costs.draft_step_us(1, width, 100)) + policy.costs.decide_us
        gain = naive_value([*probs, *children.ravel()], policy, price) - now
        nets[width] = gain - price * step
    best = max(nets.values())
    if best <= 1e-6:
        assert len(found) == 0 or nets[len(found)] == pytest.approx(best, abs=1e-6)
    else:
        assert nets[len(found)] == pytest.approx(best, abs=1e-6)
        assert found.tolist() == order[: len(found)].tolist()


@given(seed=st.integers(0, 3000), which=st.integers(0, 3), price=prices)
@settings(max_examples=40, deadline=None)
def test_rows_decide_for_themselves(seed, which, price):
    policy = make_policy(price_tok_per_us=price, calibration=some_maps()[which])
    contexts = np.array([0, 400, 999])
    batch = BatchContext(batch_size=4, context_len=contexts, num_pending=np.array([1, 2, 5]))
    trees = grow_trees(RandomDrafter(seed, 3), policy, batch)
    together = policy.select_verify(trees, batch)
    for row in range(3):
        alone = BatchContext(
            batch_size=4, context_len=contexts[row : row + 1], num_pending=np.array([1])
        )
        single = CandidateTrees.empty(1)
        bounds = [*trees.level_starts, trees.num_nodes]
        for level, (start, end) in enumerate(itertools.pairwise(bounds)):
            part = {
                name: getattr(trees, name)[row : row + 1, :end]
                for name in (
                    "tokens",
                    "parents",
                    "step_log_probs",
                    "path_log_confidence",
                    "handles",
                    "valid",
                )
            }
            single = CandidateTrees(
                **part,
                depths=trees.depths[:end],
                ranks=trees.ranks[:end],
                level_starts=bounds[: level + 1],
            )
            frontier = policy.select_frontier(single, alone) if level < 3 else None
            if frontier is not None and level + 1 < len(trees.level_starts):
                drafted = trees.parents[row, end : bounds[level + 2]]
                real = trees.valid[row, end : bounds[level + 2]]
                assert set(frontier[0][frontier[0] != NO_NODE]) == set(drafted[real])
            assert start <= end
        kept = together[row][together[row] != NO_NODE]
        assert policy.select_verify(single, alone)[0].tolist() == kept.tolist()


def test_with_every_rule_off_it_is_eagle2():
    policy = make_policy(rules=ALL_OFF)
    usual = Eagle2Spec(num_steps=4, topk=3, num_draft_tokens=8).build(None)
    batch = make_batch(20)
    ours = grow_trees(RandomDrafter(7, 20), policy, batch)
    theirs = grow_trees(RandomDrafter(7, 20), usual, batch)
    assert np.array_equal(ours.parents, theirs.parents)
    assert np.array_equal(policy.select_verify(ours, batch), usual.select_verify(theirs, batch))
    assert policy.should_speculate(batch).all()


@pytest.mark.parametrize("rule", ["prune", "stop", "adapt_width"])
def test_each_rule_can_be_switched_off(rule):
    off = {name: name != rule for name in ("prune", "stop", "adapt_width", "allow_plain")}
    policy = make_policy(price_tok_per_us=1 / 300, rules=PriceRules(**off))
    everything = make_policy(price_tok_per_us=1 / 300)
    batch = make_batch(50)
    drafter, other = RandomDrafter(1, 50), RandomDrafter(1, 50)
    trees, usual = grow_trees(drafter, policy, batch), grow_trees(other, everything, batch)
    if rule == "stop":
        assert trees.depth == 4
        assert usual.depth < 4 or (~usual.valid[:, usual.last_level]).any()
    if rule == "adapt_width":
        expanded = trees.valid[:, 3:].reshape(50, -1, 3)[:, :, 0]
        assert set(expanded[:, :3].sum(axis=1)) <= {0, 3}
        assert set(usual.valid[:, 3:].reshape(50, -1, 3)[:, :, 0].sum(axis=1)) - {0, 3, 6, 9}
    counts = (policy.select_verify(trees, batch) != NO_NODE).sum(axis=1)
    if rule == "prune":
        assert (counts == np.minimum(trees.valid.sum(axis=1), 7)).all()
    else:
        assert len(set(counts)) > 1


@given(seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_a_higher_price_never_verifies_more_of_the_same_tree(seed):
    batch = make_batch(4)
    trees = grow_trees(RandomDrafter(seed, 4), make_policy(rules=ALL_OFF), batch)
    before = np.full(4, 99)
    for price in (0.0, 1e-5, 1e-3, 1e-2, 1.0):
        policy = make_policy(price_tok_per_us=price)
        counts = (policy.select_verify(trees, batch) != NO_NODE).sum(axis=1)
        assert (counts <= before).all()
        before = counts
    assert (before == 0).all()


def test_a_batch_shares_the_time_of_a_step():
    flat = {"target": (1000.0, 0.0), "draft": (100.0, 0.0), "batches": (1, 16)}
    policy = make_policy(costs=make_table(**flat), price_tok_per_us=1 / 250)
    root = np.full((6, 1), NO_NODE)
    trees = CandidateTrees.empty(6).append(root, RandomDrafter(0, 6).expand_root(3))
    alone, together = (make_batch(6, batch_size=size) for size in (1, 16))
    assert (policy.select_frontier(trees, together) != NO_NODE).sum() > (
        policy.select_frontier(trees, alone) != NO_NODE
    ).sum()


@given(seed=st.integers(0, 3000), which=st.integers(0, 3), price=prices)
@settings(max_examples=40, deadline=None)
def test_rows_that_share_rounds_take_the_size_that_is_best_for_their_sum(seed, which, price):
    policy = make_policy(
        price_tok_per_us=price, calibration=some_maps()[which], rows_share_rounds=True
    )
    batch = make_batch(4, batch_size=4)
    trees = grow_trees(RandomDrafter(seed, 4), make_policy(rules=ALL_OFF), batch)
    columns = policy.select_verify(trees, batch)
    assert_closed_under_parents(trees, columns)
    probs = np.where(trees.valid, accept_probs(policy, trees), 0.0)
    falling = -np.sort(-probs, axis=1)
    worth = {
        size: falling[:, : size - 1].sum() - price * float(policy.costs.verify_us(4, size, 100))
        for size in policy.verify_sizes
    }
    verified = [int((row != NO_NODE).sum()) for row in columns]
    taken = next(size for size in policy.verify_sizes if size > max(verified))
    assert worth[taken] == pytest.approx(max(worth.values()), abs=1e-5)
    for row, count in enumerate(verified):
        assert count == min(taken - 1, int(trees.valid[row].sum()))


def test_a_level_that_no_row_could_pay_alone_is_drafted_if_they_pay_together():
    # Four rows would each pay a quarter of the step; what they gain together is what counts.
    flat = {"target": (1000.0, 0.0), "draft": (100.0, 0.0), "batches": (1, 16)}
    batch = make_batch(4, batch_size=4)
    root = np.full((4, 1), NO_NODE)
    drafter = RandomDrafter(3, 4)
    trees = CandidateTrees.empty(4).append(root, drafter.expand_root(3))
    counts = {}
    for shared in (False, True):
        policies = [
            make_policy(costs=make_table(**flat), price_tok_per_us=1 / us, rows_share_rounds=shared)
            for us in range(10, 400, 10)
        ]
        counts[shared] = [
            int((policy.select_frontier(trees, batch) != NO_NODE).any(axis=1).sum())
            for policy in policies
        ]
    # Alone, rows drop out one by one as time gets dearer; together, all go on or none.
    assert set(counts[True]) == {0, 4}
    assert not set(counts[False]) <= {0, 4}


@given(seed=st.integers(0, 3000), price=prices)
@settings(max_examples=30, deadline=None)
def test_a_batch_of_one_decides_alike_either_way(seed, price):
    batch = make_batch(1)
    alone, shared = (
        make_policy(price_tok_per_us=price, rows_share_rounds=share) for share in (False, True)
    )
    trees = grow_trees(RandomDrafter(seed, 1), alone, batch)
    same = grow_trees(RandomDrafter(seed, 1), shared, batch)
    assert np.array_equal(trees.tokens, same.tokens)
    assert np.array_equal(alone.select_verify(trees, batch), shared.select_verify(same, batch))


def test_tier_follows_cost():
    cheap = make_policy(costs=make_table(draft=(50.0, 1.0), target=(1000.0, 1.0)))
    dear_costs = make_table(extend=(900.0, 1.0), target=(1000.0, 400.0))
    dear = make_policy(costs=dear_costs)
    assert cheap.should_speculate(make_batch(2)).all()
    assert not dear.should_speculate(make_batch(2)).any()
    forced = make_policy(costs=dear.costs, rules=PriceRules(allow_plain=False))
    assert forced.should_speculate(make_batch(2)).all()
    speculate, plain = cheap.tier_values(make_batch(2))
    assert plain == pytest.approx([1 - 1001 / 900] * 2)
    late, _ = cheap.tier_values(make_batch(2, num_pending=200))
    assert (late < speculate).all()


def test_tier_value_is_the_best_plan_of_the_average_tree():
    policy = make_policy(topk=1, widths=(1,), verify_sizes=(1, 2, 3, 4, 5))
    price, costs = policy.price_tok_per_us, policy.costs
    batch = make_batch(1, num_pending=3)
    plans = []
    for depth, size in itertools.product(range(1, 5), policy.verify_sizes):
        accepted = sum(0.6**d for d in range(1, min(depth, size - 1) + 1))
        time_us = (
            costs.draft_extend_us(1, 3, 100)
            + costs.verify_select_us
            + (depth - 1) * (costs.draft_step_us(1, 1, 100) + costs.decide_us)
            + costs.verify_us(1, size, 100)
        )
        plans.append(1 + accepted - price * float(time_us))
    assert policy.tier_values(batch)[0][0] == pytest.approx(max(plans), abs=1e-6)


def test_drafting_ahead_makes_levels_cheaper_and_a_stop_dearer():
    costs = make_table(draft=(100.0, 5.0), decide_us=20.0)
    ahead = replace(costs, drafts_ahead=True)
    shape = {"topk": 1, "widths": (1,), "verify_sizes": (1, 2, 3, 4, 5)}
    policy = make_policy(**shape, costs=ahead)
    plans = []
    for depth, size in itertools.product(range(1, 5), policy.verify_sizes):
        accepted = sum(0.6**d for d in range(1, min(depth, size - 1) + 1))
        time_us = 130 + 20 + (depth - 1) * 105 + (depth < 4) * (105 - 20) + (1000 + 10 * size)
        plans.append(1 + accepted - policy.price_tok_per_us * time_us)
    found = policy.tier_values(make_batch(1))[0][0]
    assert found == pytest.approx(max(plans), abs=1e-6)
    assert found != make_policy(**shape, costs=costs).tier_values(make_batch(1))[0][0]


def test_tier_value_prefers_measured_averages_of_the_same_branching():
    ranked = ((0.5, 0.2), (0.6, 0.3, 0.2), (0.7, 0.4, 0.2), (0.7, 0.5, 0.2))
    model = make_continuation(topk=3).model_copy(update={"ranked_probs": ranked})
    policy = make_policy(continuation=model, verify_sizes=(1, 2, 4), widths=(3,))
    price, costs = policy.price_tok_per_us, policy.costs
    plans = []
    for index, size in itertools.product(range(4), policy.verify_sizes):
        time_us = (
            costs.draft_extend_us(1, 2, 100)
            + costs.verify_select_us
            + index * (costs.draft_step_us(1, 3, 100) + costs.decide_us)
            + costs.verify_us(1, size, 100)
        )
        plans.append(1 + sum(ranked[index][: size - 1]) - price * float(time_us))
    assert policy.tier_values(make_batch(1))[0][0] == pytest.approx(max(plans), abs=1e-6)
    narrower = make_policy(continuation=model, topk=2, widths=(2,), verify_sizes=(1, 2, 4))
    unranked = make_policy(
        continuation=make_continuation(topk=3), topk=2, widths=(2,), verify_sizes=(1, 2, 4)
    )
    assert narrower.tier_values(make_batch(1))[0] == unranked.tier_values(make_batch(1))[0]


def test_a_larger_forecast_scale_never_drafts_less():
    batch = make_batch(80)
    before = np.zeros(80)
    for scale in (1e-6, 0.5, 1.0, 2.0, 50.0):
        policy = make_policy(forecast_scale=scale, rules=PriceRules(adapt_width=False))
        trees = grow_trees(RandomDrafter(5, 80), make_policy(rules=ALL_OFF, num_steps=2), batch)
        expanded = (policy.select_frontier(trees, batch) != NO_NODE).sum(axis=1)
        assert (expanded >= before).all()
        before = expanded
    assert before.sum() > 0


def test_older_trees_can_still_be_asked_after_newer_ones():
    policy, eager = make_policy(), make_policy(rules=ALL_OFF)
    batch, drafter = make_batch(5), RandomDrafter(8, 5)
    older = CandidateTrees.empty(5).append(np.full((5, 1), NO_NODE), drafter.expand_root(3))
    expected = policy.select_verify(older, batch)
    frontier = eager.select_frontier(older, batch)
    newer = older.append(frontier, drafter.expand(frontier, 3))
    policy.select_verify(newer, batch)
    assert np.array_equal(policy.select_verify(older, batch), expected)


def test_memo_does_not_outlive_its_batch():
    policy = make_policy(costs=make_table(), price_tok_per_us=1 / 100)
    slow = make_policy(rules=ALL_OFF)
    trees = grow_trees(RandomDrafter(0, 3), slow, make_batch(3))
    for batch in (make_batch(3, context_len=0), make_batch(3, context_len=1000)):
        fresh = grow_trees(RandomDrafter(0, 3), slow, make_batch(3))
        assert np.array_equal(
            policy.select_verify(trees, batch), policy.select_verify(fresh, batch)
        )
    with pytest.raises(CostTableRangeError, match="context_len=1001"):
        policy.select_verify(trees, make_batch(3, context_len=1001))


@given(
    seed=st.integers(0, 1000),
    num_best=st.integers(0, 6),
    num_children=st.integers(1, 4),
    largest=st.integers(2, 9),
)
@settings(max_examples=50, deadline=None)
def test_list_operations_equal_plain_sorting(seed, num_best, num_children, largest):
    rng = np.random.default_rng(seed)
    count = largest - 1
    best = -np.sort(-rng.random((2, min(num_best, count))).astype(np.float32), axis=1)
    children = rng.random((2, 3, num_children)).astype(np.float32)
    sizes = np.unique([1, (largest + 1) // 2, largest])
    cost = rng.random((2, len(sizes)))
    gains = forecast_gain(best, children, np.array([1, 3]), sizes, cost)
    for row in range(2):

        def value(probs, row=row):
            ordered = sorted(probs, reverse=True)
            return max(sum(ordered[: s - 1]) - c for s, c in zip(sizes, cost[row], strict=True))

        now = value(best[row])
        for index, width in enumerate((1, 3)):
            expected = value([*best[row], *children[row, :width].ravel()]) - now
            assert gains[row, index] == pytest.approx(expected, abs=1e-5)
    merged = merge_best(best, children.reshape(2, -1), 4)
    whole = np.concatenate([best, children.reshape(2, -1)], axis=1)
    assert np.array_equal(merged, -np.sort(-whole, axis=1)[:, :4])
    assert size_values(best, np.array([1]), np.zeros((2, 1))).tolist() == [[0.0], [0.0]]


def test_equal_widths_go_to_the_narrowest_and_no_gain_stops():
    gains = np.array([[0.5, 0.5], [0.0, 0.1], [0.1, 0.6]])
    price = np.array([[0.1, 0.1], [0.1, 0.1], [0.2, 0.3]])
    assert choose_width(gains, price, may_stop=True).tolist() == [0, -1, 1]
    assert choose_width(gains, price, may_stop=False).tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"price_tok_per_us": -1.0}, PolicyConfigError, "price_tok_per_us must be finite"),
        ({"price_tok_per_us": np.nan}, PolicyConfigError, "got nan"),
        ({"forecast_scale": 0.0}, PolicyConfigError, "forecast_scale must be finite and above 0"),
        ({"verify_sizes": (2, 4)}, PolicyConfigError, r"rise from 1 .* got \[2, 4\]"),
        ({"verify_sizes": (1,)}, PolicyConfigError, "at least one larger size"),
        ({"verify_sizes": (1, 4, 4)}, PolicyConfigError, "verify_sizes must rise"),
        ({"verify_sizes": (1, 64)}, TreeLimitsError, "got num_draft_tokens=64"),
        ({"verify_sizes": (1, 300), "num_steps": 32, "topk": 4}, PolicyConfigError, r"\[1, 256\]"),
        ({"widths": ()}, PolicyConfigError, "widths must rise"),
        ({"widths": (0, 1)}, PolicyConfigError, "widths must rise from at least 1"),
        ({"widths": (1, 4)}, PolicyConfigError, "widths must be at most topk=3"),
        ({"num_steps": 0}, TreeLimitsError, "num_steps=0"),
        ({"continuation": make_continuation(topk=2)}, PolicyConfigError, "at least topk=3"),
    ],
    ids=str,
)
def test_parameters_out_of_range_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        make_policy(**changes)
