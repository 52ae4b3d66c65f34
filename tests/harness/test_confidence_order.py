"""Policies that promise the order of their frontiers keep to it, so that drafts may be foreseen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cost_maker import make_table
from hypothesis import given, settings
from hypothesis import strategies as st
from price_maker import make_policy
from tree_maker import make_batch

from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.policies.confidence_order import ConfidenceOrder, confidence_order
from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.online_price import OnlinePricePolicy
from sgl_eagle_harness.policies.plain import PlainPolicy
from sgl_eagle_harness.policies.price import PriceRules
from sgl_eagle_harness.policies.recording import RecordingPolicy
from sgl_eagle_harness.policies.static import StaticPolicy
from sgl_eagle_harness.types import NO_NODE, Children

FIXED = PriceRules(stop=False, adapt_width=False)
PROMISING = {
    "eagle2": Eagle2Spec(num_steps=4, topk=3, num_draft_tokens=9).build(None),
    "chain": StaticPolicy.chain(4),
    "price": make_policy(),
    "price-per-batch": make_policy(rows_share_rounds=True),
    "price-one-width": make_policy(rules=PriceRules(adapt_width=False)),
    "price-narrow": make_policy(widths=(1, 2), rules=FIXED),
    "price-fixed": make_policy(rules=FIXED),
    "price-cheap-time": make_policy(price_tok_per_us=1e-9),
}
NUM_ROWS = 5


class CoarseDrafter:
    """Children whose few probabilities make many ties; now and then a node has none."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def expand_root(self, topk):
        return self._children(np.ones((NUM_ROWS, 1), bool), topk)

    def expand(self, handles, topk):
        return self._children(handles != NO_NODE, topk)

    def _children(self, real, topk):
        shape = (*real.shape, topk)
        log_probs = -np.sort(self.rng.integers(0, 4, shape), axis=-1).astype(np.float32) / 2
        real = real & (self.rng.random(real.shape) > 0.15)
        return Children(
            tokens=np.zeros(shape, np.int64),
            log_probs=log_probs,
            handles=np.arange(shape[1] * topk).reshape(shape[1:]) + np.zeros(shape, np.int64),
            valid=np.broadcast_to(real[..., None], shape).copy(),
        )


class Watched:
    """A policy whose frontiers are compared with the order at the time they are chosen."""

    def __init__(self, policy):
        self.policy, self.limits = policy, policy.limits
        self.num_chosen = []

    def select_frontier(self, trees, batch):
        frontier = self.policy.select_frontier(trees, batch)
        level = trees.last_level
        for row in range(trees.num_rows):
            columns = np.flatnonzero(trees.valid[row, level]) + level.start
            order = columns[np.argsort(-trees.path_log_confidence[row, columns], kind="stable")]
            chosen = frontier[row][frontier[row] != NO_NODE]
            assert len(chosen) <= self.limits.topk
            assert chosen.tolist() == order[: len(chosen)].tolist()
            self.num_chosen.append((trees.depth, len(chosen), len(order)))
        return frontier


@pytest.mark.parametrize("name", PROMISING)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_frontiers_are_the_first_of_the_promised_order(name, seed):
    policy = PROMISING[name]
    watched = Watched(policy)
    trees = grow_trees(CoarseDrafter(seed), watched, make_batch(NUM_ROWS))
    order = confidence_order(policy)
    num_certain_steps = order.num_certain_steps
    assert num_certain_steps in {0, policy.limits.num_steps - 1}
    for depth, num_chosen, num_nodes in watched.num_chosen:
        if depth <= num_certain_steps:
            assert num_chosen == min(num_nodes, policy.limits.topk)
    if order.num_draft_tokens is not None:
        assert order.num_draft_tokens == policy.limits.num_draft_tokens
        assert policy.should_speculate(make_batch(NUM_ROWS)).all()
        verified = policy.select_verify(trees, make_batch(NUM_ROWS))
        for row in range(NUM_ROWS):
            columns = np.flatnonzero(trees.valid[row])
            best = np.argsort(-trees.path_log_confidence[row, columns], kind="stable")
            wanted = np.sort(columns[best[: order.num_draft_tokens - 1]])
            assert verified[row][verified[row] != NO_NODE].tolist() == wanted.tolist()


def test_a_price_that_follows_the_server_asks_where_decisions_are_cheaper_than_drafts():
    def order_at(batch_size, *, decide_us):
        costs = make_table(draft=(20.0, 10.0), decide_us=decide_us, batches=(1, 64))
        prior = make_policy(
            costs=replace(costs, drafts_ahead=True),
            widths=(3,),
            rules=PriceRules(adapt_width=False),
        )
        policy = OnlinePricePolicy(prior, typical_context=100, batch_edges=(1,))
        assert confidence_order(policy) == ConfidenceOrder(num_certain_steps=0)
        return confidence_order(policy, batch_size)

    every_step = ConfidenceOrder(num_certain_steps=3)
    asks = ConfidenceOrder(num_certain_steps=0)
    assert order_at(1, decide_us=500.0) == every_step
    assert order_at(1, decide_us=1.0) == asks
    # A draft step of 64 requests takes longer than the same decision.
    assert order_at(64, decide_us=500.0) == asks


def test_policies_that_choose_in_another_way_promise_nothing():
    irregular = StaticPolicy(name="odd", paths=((0,), (1,), (1, 0)))
    for policy in (irregular, PlainPolicy(), RecordingPolicy(num_steps=3, beams=(2,))):
        assert confidence_order(policy) is None
