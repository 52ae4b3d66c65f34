from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_maker import (
    RandomDrafter,
    TableDrafter,
    assert_closed_under_parents,
    make_batch,
    path_names,
)

from sgl_eagle_harness.draft_loop import grow_trees, verify_tree
from sgl_eagle_harness.objective import expected_accept_length
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.tree_build import (
    keep_columns,
    rank_log_scores,
    rank_probs,
    select_rerank,
    take_best,
)
from sgl_eagle_harness.types import NO_NODE, CandidateTrees, TreeLimits

LESSON = {
    "": [("A", 0.90), ("B", 0.08)],
    "A": [("C", 0.70), ("D", 0.20)],
    "B": [("E", 0.60), ("F", 0.30)],
    "AC": [("G", 0.80), ("H", 0.10)],
    "AD": [("I", 0.50), ("J", 0.40)],
}


def eagle2(num_steps, topk, num_draft_tokens):
    limits = TreeLimits(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)
    return Eagle2Policy(limits=limits)


def test_worked_tree_of_the_eagle2_lesson():
    policy = eagle2(3, 2, 6)
    drafter = TableDrafter(LESSON.__getitem__)
    trees = grow_trees(drafter, policy, make_batch())
    columns = policy.select_verify(trees, make_batch())
    assert path_names(trees, columns) == ["A", "AC", "AD", "ACG", "ADI"]
    tree = verify_tree(trees, 0, columns[0], ord("!"))
    assert tree.num_draft_tokens == 6
    assert tree.depths.tolist() == [0, 1, 2, 2, 3, 3]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 2, 3]
    assert np.exp(tree.path_log_confidence) == pytest.approx([1, 0.9, 0.63, 0.18, 0.504, 0.09])


class ExpandTwo:
    """The lesson's loop with its own frontier width: three children kept, two nodes expanded."""

    limits = TreeLimits(num_steps=3, topk=3, num_draft_tokens=7)

    def select_frontier(self, trees, batch):
        return eagle2(3, 3, 7).select_frontier(trees, batch)[:, :2]


@pytest.mark.parametrize(
    ("offer", "depths", "accepted"),
    [
        ((0.90, 0.06, 0.02), [1, 1, 2, 2, 2, 3], 2.61),
        ((0.40, 0.30, 0.20), [1, 1, 1, 2, 2, 2], 1.30),
    ],
    ids=["confident", "unsure"],
)
@pytest.mark.parametrize("grower", [ExpandTwo(), eagle2(3, 3, 7)], ids=["expand two", "expand all"])
def test_constant_drafter_spreads_where_it_is_unsure(offer, depths, accepted, grower):
    drafter = TableDrafter(lambda _: list(zip("xyz", offer, strict=True)))
    trees = grow_trees(drafter, grower, make_batch())
    columns = eagle2(3, 3, 7).select_verify(trees, make_batch())[0]
    assert trees.depths[columns].tolist() == depths
    confidence = np.exp(trees.path_log_confidence[0, columns].astype(np.float64))
    assert expected_accept_length(confidence) - 1 == pytest.approx(accepted, abs=0.01)


@given(
    seed=st.integers(0, 10_000),
    num_steps=st.integers(1, 5),
    topk=st.integers(1, 5),
    size=st.integers(2, 20),
    certain=st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=80, deadline=None)
def test_reranked_nodes_are_a_tree_and_the_best_ones(seed, num_steps, topk, size, certain):
    largest = 1 + topk + (num_steps - 1) * topk**2
    policy = eagle2(num_steps, topk, min(size, largest))
    drafter = RandomDrafter(seed, 3, certain=certain)
    trees = grow_trees(drafter, policy, make_batch(3))
    columns = policy.select_verify(trees, make_batch(3))
    assert_closed_under_parents(trees, columns)
    for row in range(3):
        kept = columns[row][columns[row] != NO_NODE]
        assert len(kept) == min(policy.limits.num_draft_tokens - 1, trees.valid[row].sum())
        scores = trees.path_log_confidence[row]
        rest = np.setdiff1d(np.flatnonzero(trees.valid[row]), kept)
        assert not len(rest) or scores[kept].min() >= scores[rest].max()


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_certain_child_never_displaces_its_parent(zero):
    logs = np.array([[-1.0, -0.0, zero, zero]], np.float32)
    valid = np.ones((1, 4), bool)
    assert take_best(rank_log_scores(logs, valid), 2).tolist() == [[1, 2]]
    probs = np.array([[0.5, 1.0, 1.0 - 1e-12, 0.0]])
    assert take_best(rank_probs(probs, valid), 4).tolist() == [[1, 2, 0, 3]]


def test_invalid_nodes_rank_last_even_behind_impossible_ones():
    valid = np.array([[True, False, True]])
    assert take_best(rank_probs(np.array([[0.0, 0.9, 0.2]]), valid), 3).tolist() == [[2, 0, 1]]
    logs = np.array([[-50.0, -0.1, -3.0]], np.float32)
    assert take_best(rank_log_scores(logs, valid), 3).tolist() == [[2, 0, 1]]
    chosen = select_rerank(logs, valid, 3)
    assert chosen.tolist() == [[0, 2, NO_NODE]]


def test_a_size_per_row_is_respected():
    logs = -np.arange(12, dtype=np.float32).reshape(2, 6)
    chosen = select_rerank(logs, np.ones((2, 6), bool), np.array([1, 4]))
    assert chosen.tolist() == [[0, NO_NODE, NO_NODE, NO_NODE], [0, 1, 2, 3]]
    assert keep_columns(np.array([[5, 2]]), np.array([[True, False]])).tolist() == [[5, NO_NODE]]


def test_float32_path_logs_rank_as_float64_at_depth_16():
    rng = np.random.default_rng(16)
    num_chains, depth = 4000, 16
    logs = np.log(rng.uniform(1e-3, 0.999, (num_chains, depth)))
    rounded = logs.astype(np.float32)
    exact = rounded.astype(np.float64).sum(axis=1)
    kept = np.zeros(num_chains, np.float32)
    for step in range(depth):
        kept = kept + rounded[:, step]
    # A path of k additions errs by at most k half-ulps of its largest partial sum.
    bound = depth * np.spacing(np.abs(kept)) / 2
    assert (np.abs(kept - exact) <= bound).all()
    by_fp64, by_fp32 = np.argsort(-exact), np.argsort(-kept)
    swapped = exact[by_fp64] - exact[by_fp32]
    assert np.abs(swapped).max() <= 2 * bound.max()
    top = 64
    assert set(by_fp64[:top]) == set(by_fp32[:top])
    products = np.prod(np.exp(rounded).astype(np.float16), axis=1)
    assert len(np.unique(products)) < len(np.unique(kept)) / 4


def test_append_keeps_deep_paths_finite_where_products_underflow():
    drafter = TableDrafter(lambda _: [("a", 1e-4), ("b", 5e-5)])
    policy = eagle2(16, 1, 17)
    trees = grow_trees(drafter, policy, make_batch())
    assert np.float32(1e-4) ** np.float32(16) == 0
    assert trees.path_log_confidence[0, -1] == pytest.approx(16 * np.log(1e-4), rel=1e-5)
    assert policy.select_verify(trees, make_batch()).shape == (1, 16)


def test_empty_trees_select_nothing():
    chosen = eagle2(2, 2, 4).select_verify(CandidateTrees.empty(2), make_batch(2))
    assert chosen.shape == (2, 0)
