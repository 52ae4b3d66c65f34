"""A plan in a made-up server comes close to the best fixed shape, which it cannot know.

Trees have true acceptance probabilities, of which the draft's confidences are a distortion, and
rounds take other times than the cost table says.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from plan_maker import make_plan, shape_of
from tree_maker import make_batch

from sgl_eagle_harness.calibration import IdentityMap
from sgl_eagle_harness.policies.learning import VerifiedRows
from sgl_eagle_harness.policies.online_plan import OnlinePlanPolicy
from sgl_eagle_harness.round_shape import PLAIN_ROUND, RoundShape

TOPK, NUM_LEVELS, NUM_TREES = 3, 3, 400


@dataclass
class Tree:
    depths: np.ndarray
    logs: np.ndarray
    accepted: np.ndarray

    def num_correct(self, shape: RoundShape) -> int:
        inside = self.depths <= shape.num_steps
        best = np.argsort(-np.where(inside, self.logs, -np.inf), kind="stable")
        return int((self.accepted & inside)[best[: shape.num_draft_tokens - 1]].sum())


def make_tree(rng, *, ease, trust) -> Tree:
    """Of each node's children at most one is right; confidence is the probability to a power."""
    level, nodes = [(0.0, True)], []
    for depth in range(1, NUM_LEVELS + 1):
        children = []
        for log, on_path in level:
            first = rng.beta(ease, 1.0)
            probs = np.array([first, 0.6 * (1 - first), 0.3 * (1 - first)])
            right = int(np.searchsorted(np.cumsum(probs), rng.random()))
            children += [
                (log + trust * np.log(max(prob, 1e-6)), on_path and rank == right)
                for rank, prob in enumerate(probs)
            ]
        nodes += [(depth, log, accepted) for log, accepted in children]
        level = sorted(children, key=lambda child: -child[0])[:TOPK]
    depths, logs, accepted = map(np.array, zip(*nodes, strict=True))
    return Tree(depths, logs.astype(np.float32), accepted)


def share_of_best(rng, trees, *, batch_size, wrong_by, num_rounds=3000):
    """Tokens a microsecond over those of the best fixed shape; shapes that ran, trials apart."""
    plan = make_plan()
    correct = {
        shape: np.array([tree.num_correct(shape) for tree in trees]) if shape.num_steps else None
        for shape in plan.shapes
    }
    us = dict(zip(plan.shapes, plan.shape_us(batch_size, 100), strict=True))
    us = {shape: each * wrong_by(shape) for shape, each in us.items()}
    best = max(
        (1 + (0 if correct[shape] is None else correct[shape].mean())) / us[shape]
        for shape in plan.shapes
    )
    policy = OnlinePlanPolicy(plan, IdentityMap(), batch_edges=(1, 2, 4, 8, 16, 32, 64))
    batch = make_batch(batch_size, batch_size=batch_size)
    num_tokens, elapsed, shapes = 0, 0.0, []
    for _ in range(num_rounds):
        shape = shape_of(policy, batch)
        drawn = rng.integers(0, len(trees), batch_size)
        found = np.zeros(batch_size, np.int64)
        if shape.num_steps:
            found = correct[shape][drawn]
            tree = trees[drawn[0]]
            known = tree.depths <= shape.num_steps
            policy.observe_nodes(
                tree.depths[known], tree.logs[known], tree.accepted[known].astype(float)
            )
        took = us[shape] * rng.uniform(0.8, 1.2)
        policy.observe_step(
            VerifiedRows.of_rows(
                batch_size=batch_size,
                elapsed_us=took,
                depths=np.full(batch_size, shape.num_steps),
                num_draft_tokens=np.full(batch_size, shape.num_draft_tokens),
                num_correct_drafts=found,
            )
        )
        num_tokens += batch_size + int(found.sum())
        elapsed += took
        shapes.append(policy.running_shape)
    return num_tokens / elapsed / (batch_size * best), shapes


@pytest.mark.parametrize("batch_size", [1, 4, 16, 64])
@pytest.mark.parametrize(
    ("ease", "trust"), [(4.0, 1.0), (1.5, 0.6), (0.15, 0.5)], ids=["good", "sure", "bad"]
)
def test_it_comes_close_to_the_best_fixed_shape(batch_size, ease, trust):
    rng = np.random.default_rng(batch_size)
    trees = [make_tree(rng, ease=ease, trust=trust) for _ in range(NUM_TREES)]

    def wrong_by(shape):  # as a table is whose rounds overlapped with nothing
        return 0.75 if shape == PLAIN_ROUND else 0.7

    share, shapes = share_of_best(rng, trees, batch_size=batch_size, wrong_by=wrong_by)
    assert share > 0.95  # which takes up to 2500 rounds to learn
    switch_ct = sum(one != other for one, other in itertools.pairwise(shapes))
    assert switch_ct < 30


def test_it_leaves_a_shape_that_is_slower_than_measured_beforehand():
    rng = np.random.default_rng(0)
    trees = [make_tree(rng, ease=4.0, trust=1.0) for _ in range(NUM_TREES)]

    def wrong_by(shape):
        return 1.5 if shape.num_steps == NUM_LEVELS else 1.0

    share, shapes = share_of_best(rng, trees, batch_size=1, wrong_by=wrong_by, num_rounds=8000)
    assert shapes[0].num_steps == NUM_LEVELS
    assert shapes[-1].num_steps == NUM_LEVELS - 1
    assert share > 0.85
