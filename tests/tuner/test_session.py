import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sgl_eagle_harness.draft_loop import grow_trees, verify_tree
from sgl_eagle_harness.policies.plain import PlainSpec
from sgl_eagle_harness.policies.plan import PlanSpec
from sgl_eagle_harness.policies.tier import SpeculationTier, TierConfig
from sgl_eagle_harness.types import BatchContext
from sgl_eagle_tuner.baselines import eagle2_spec
from sgl_eagle_tuner.policy_names import named_policy
from sgl_eagle_tuner.search_space import PointBuilder, PricePoint
from sgl_eagle_tuner.session import ReplaySession
from sgl_eagle_tuner.simulator import SimulationConfig
from sgl_eagle_tuner.static_grid import grid_limits

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from plan_maker import policy_of_round


def point(**changes) -> PricePoint:
    settings = {
        "num_steps": 4,
        "topk": 4,
        "max_draft_tokens": 24,
        "size_set": "every",
        "calibration": "isotonic",
        "price_ratio": 1.0,
        "stop": True,
        "adapt_width": True,
    }
    return PricePoint(**(settings | changes))


POINTS = {
    "all rules": point(),
    "identity": point(calibration="identity"),
    "temperature": point(calibration="temperature", topk=2, num_steps=3),
    "no stop": point(stop=False),
    "no width": point(adapt_width=False, size_set="powers"),
    "high price": point(price_ratio=2.5),
    "chain": point(topk=1, size_set="sparse"),
}


def run_engine(language, text, policy, live_drafter):
    """Steps of one prompt: (position, tokens emitted, nodes verified, pending)."""
    completion, steps, tier = text[2:], [], SpeculationTier()
    num_done, num_pending = 1, 1
    while num_done < len(completion):
        before = (text[num_done], text[num_done + 1])
        batch = BatchContext(
            batch_size=1, context_len=np.array([num_done + 1]), num_pending=np.array([num_pending])
        )
        if not tier.choose(policy, batch):
            steps.append((num_done, 1, 1, num_pending))
            num_done, num_pending = num_done + 1, num_pending + 1
            continue
        trees = grow_trees(live_drafter(language, before), policy, batch)
        tree = verify_tree(trees, 0, policy.select_verify(trees, batch)[0], before[1])
        edges = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
        child_of = {edge: node for node, edge in enumerate(edges)}
        node, accepted = 0, 0
        for token in completion[num_done:]:
            if (node, token) not in child_of:
                break
            node, accepted = child_of[node, token], accepted + 1
        emitted = min(accepted + 1, len(completion) - num_done)
        steps.append((num_done, emitted, tree.num_draft_tokens, num_pending))
        num_done, num_pending = num_done + emitted, emitted
    return steps


def compare_with_engine(corpus, costs, spec, live_drafter):
    policy, trace = spec.build(costs), corpus.trace
    run = ReplaySession(trace, costs).run(spec)
    replayed = zip(
        run.prompt_index.tolist(),
        trace.position[run.rows].tolist(),
        run.num_accept_tokens.tolist(),
        run.loads.num_draft_tokens.tolist(),
        run.loads.num_pending.tolist(),
        strict=True,
    )
    expected = [
        (prompt, *step)
        for prompt, (language, text) in enumerate(zip(corpus.languages, corpus.texts, strict=True))
        for step in run_engine(language, text, policy, live_drafter)
    ]
    # Rows that the trace does not cover are allowed to differ, and are counted; here are none.
    assert not run.uncovered.any()
    assert list(replayed) == expected
    return run


@pytest.mark.parametrize("name", POINTS)
def test_price_policies_replay_exactly(corpus, costs, live_drafter, name):
    spec = PointBuilder(trace=corpus.trace, costs=costs).build(POINTS[name], 2e-3)
    run = compare_with_engine(corpus, costs, spec, live_drafter)
    assert len(set(run.loads.num_draft_tokens.tolist())) > 1


def test_tier_changes_replay_exactly(corpus, cost_maker, live_drafter):
    # Drafting so dear that the tiers are about even: the choice turns on context and backlog.
    costs = cost_maker(target=(1000.0, 150.0), draft=(10.0, 120.0))
    spec = (
        PointBuilder(trace=corpus.trace, costs=costs)
        .build(point(), 1 / 900)
        .model_copy(update={"tier": TierConfig(margin_tok=0.0, min_dwell_steps=2)})
    )
    run = compare_with_engine(corpus, costs, spec, live_drafter)
    assert 0 < run.outcome.speculated_share < 1
    assert run.switch_ct > 0
    assert run.loads.num_pending.max() > 5


PLAN = PlanSpec(
    num_steps=4,
    topk=4,
    verify_sizes=(1, 2, 4, 8, 16),
    expected_drafts=(
        (0.0, 0.5, 0.8, 0.8, 0.8),
        (0.0, 0.5, 1.0, 1.3, 1.5),
        (0.0, 0.5, 1.1, 1.6, 2.0),
        (0.0, 0.5, 1.1, 1.7, 2.3),
    ),
)


def dearer_with_context(costs):
    grid = costs.target
    tokens = grid.num_tokens[:, None] * grid.context_len
    return replace(costs, target=replace(grid, us=grid.us + 20.0 * tokens))


def test_plans_replay_exactly(corpus, cost_maker, live_drafter):
    run = compare_with_engine(corpus, dearer_with_context(cost_maker()), PLAN, live_drafter)
    loads = run.loads
    pairs = set(zip((loads.widths > 0).sum(axis=1), loads.num_draft_tokens, strict=True))
    assert len(pairs) > 2
    assert 0 < run.outcome.speculated_share < 1


@pytest.mark.parametrize(("batch_size", "name"), [(1, "eagle2-4-4-16"), (4, "eagle2-2-4-4")])
def test_a_plan_is_simulated_as_the_policy_of_its_shape(corpus, cost_maker, batch_size, name):
    costs = cost_maker(target=(1000.0, 30.0), batch_sizes=(batch_size,))
    session = ReplaySession(corpus.trace, costs)
    load = SimulationConfig(max_running=batch_size)
    shapes = {
        policy_of_round(
            PLAN.build(costs),
            BatchContext(
                batch_size=batch_size, context_len=np.array([context]), num_pending=np.ones(1)
            ),
        ).name
        for context in corpus.trace.context_len.tolist()
    }
    assert shapes == {name}
    found, wanted = (session.simulate(spec, load) for spec in (PLAN, named_policy(name)))
    np.testing.assert_array_equal(found.loads.num_draft_tokens, wanted.loads.num_draft_tokens)
    np.testing.assert_array_equal(found.counts.emitted, wanted.counts.emitted)


@pytest.mark.parametrize("drafts_ahead", [True, False])
def test_where_drafts_run_ahead_only_what_a_policy_decides_is_charged(corpus, costs, drafts_ahead):
    costs = replace(costs, drafts_ahead=drafts_ahead)
    session = ReplaySession(corpus.trace, costs)
    load = SimulationConfig(max_running=1)
    specs = {
        "eagle2": named_policy("eagle2-4-4-16"),
        "chain": named_policy("chain-3"),
        "plan": PLAN,
        "price": PointBuilder(trace=corpus.trace, costs=costs).build(point(), 1e-5),
    }
    charged = {}
    for name, spec in specs.items():
        outcomes = session.run(spec).outcome, session.simulate(spec, load).outcome
        decide_us = [outcome.step_means.decide_us for outcome in outcomes]
        charged[name] = decide_us[0] > 0
        assert decide_us[0] == pytest.approx(decide_us[1])
    asked = not drafts_ahead
    assert charged == {"eagle2": asked, "chain": asked, "plan": asked, "price": True}


@pytest.mark.parametrize("price", [1e-5, 2e-3, 2e-2])
def test_a_batch_of_one_is_the_single_stream(corpus, costs, price):
    session = ReplaySession(corpus.trace, costs)
    spec = PointBuilder(trace=corpus.trace, costs=costs).build(point(), price)
    # One tier per request against one per batch: the same unless a change was damped.
    spec = spec.model_copy(update={"tier": TierConfig(margin_tok=0.0, min_dwell_steps=1)})
    alone, batched = session.run(spec).outcome, session.simulate(spec, SimulationConfig()).outcome
    np.testing.assert_allclose(alone.totals.elapsed_us, batched.totals.elapsed_us)
    assert alone.accept_length == batched.accept_length


def test_a_higher_price_verifies_fewer_nodes(corpus, costs):
    session = ReplaySession(corpus.trace, costs)
    builder = PointBuilder(trace=corpus.trace, costs=costs)
    tables = [session.steps(builder.build(point(), price)) for price in (1e-5, 5e-4, 2e-3, 5e-3)]
    for low, high in itertools.pairwise(tables):
        assert high.num_drafted.mean() <= low.num_drafted.mean()
        assert high.num_draft_tokens.mean() < low.num_draft_tokens.mean()
        assert high.num_accept_tokens.mean() <= low.num_accept_tokens.mean()


def test_tables_are_remembered_until_they_are_many(corpus, costs, monkeypatch):
    monkeypatch.setattr("sgl_eagle_tuner.session.REMEMBERED_TABLES", 2)
    session = ReplaySession(corpus.trace, costs)
    settings = grid_limits(corpus.trace.header, costs)[:3]
    first, second, third = map(eagle2_spec, settings)
    table = session.steps(first)
    assert session.steps(first) is table
    session.steps(second)
    session.steps(third)
    assert session.steps(first) is not table


@pytest.mark.parametrize("load", [None, SimulationConfig(max_running=4)], ids=["single", "batch"])
def test_grid_outcomes_are_those_of_single_settings(corpus, cost_maker, load):
    session = ReplaySession(corpus.trace, cost_maker(batch_sizes=(1, 2, 4)), load)
    settings = grid_limits(corpus.trace.header, session.costs)[::7]
    for limits, outcome in session.grid_outcomes(settings):
        alone = session.outcome(eagle2_spec(limits))
        assert outcome.us_per_token == pytest.approx(alone.us_per_token)
        assert outcome.accept_rate == pytest.approx(alone.accept_rate)


def test_plain_decoding_costs_the_same_however_it_is_replayed(corpus, costs):
    outcome = ReplaySession(corpus.trace, costs).outcome(PlainSpec())
    assert outcome.mean_num_steps == 0
    assert outcome.speculated_share == 0
    assert outcome.step_means.draft_extend_us == 0
    assert outcome.us_per_token == outcome.step_means.verify_us
