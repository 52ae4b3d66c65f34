from __future__ import annotations

import numpy as np
import pytest
from tree_maker import RandomDrafter, TableDrafter, assert_closed_under_parents, make_batch

from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.errors import PolicyConfigError, TreeLimitsError
from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.plain import PlainPolicy
from sgl_eagle_harness.policies.static import EAGLE1_PATHS, StaticPolicy
from sgl_eagle_harness.types import NO_NODE, CandidateTrees


def rank_paths(trees, columns, row=0):
    found = set()
    for selected in columns[row][columns[row] != NO_NODE]:
        path, column = (), selected
        while column != NO_NODE:
            path = (int(trees.ranks[column]), *path)
            column = trees.parents[row, column]
        found.add(path)
    return found


@pytest.mark.parametrize(
    "policy",
    [
        StaticPolicy.eagle1(),
        StaticPolicy.chain(1),
        StaticPolicy.chain(4),
        StaticPolicy(name="odd", paths=((2,), (0,), (2, 1), (2, 0), (2, 1, 3), (0, 0))),
    ],
    ids=lambda policy: policy.name,
)
def test_static_tree_is_exactly_its_shape(policy):
    drafter = RandomDrafter(0, 3)
    trees = grow_trees(drafter, policy, make_batch(3))
    columns = policy.select_verify(trees, make_batch(3))
    assert_closed_under_parents(trees, columns)
    for row in range(3):
        assert rank_paths(trees, columns, row) == set(policy.paths)
    parents = {path[:-1] for path in policy.paths}
    widths = [sum(len(p) == d for p in parents) for d in range(1, policy.limits.num_steps)]
    assert drafter.widths == widths


def test_eagle1_has_26_nodes_and_5_steps():
    policy = StaticPolicy.eagle1()
    assert policy.limits.num_draft_tokens == 26
    assert policy.limits.num_steps == 5
    assert policy.limits.topk == 4
    assert len(set(EAGLE1_PATHS)) == 25


def test_a_drafter_that_runs_dry_leaves_a_smaller_tree():
    table = {"": [("a", 0.9), ("b", 0.1)], "a": [("c", 0.5)]}
    policy = StaticPolicy(name="s", paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
    trees = grow_trees(TableDrafter(lambda name: table.get(name, [])), policy, make_batch())
    columns = policy.select_verify(trees, make_batch())
    assert_closed_under_parents(trees, columns)
    assert rank_paths(trees, columns) == {(0,), (1,), (0, 0)}


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ((), "at least one node"),
        (((0,), (0,)), "distinct, got 1 repeats"),
        (((0, 0),), r"every node's parent, \(0,\) is missing"),
        (((-1,),), "all at least 0"),
        (((),), "at least one rank"),
    ],
)
def test_paths_that_are_no_tree_are_refused(paths, message):
    with pytest.raises(PolicyConfigError, match=message):
        StaticPolicy(name="bad", paths=paths)


def test_impossible_numbers_are_refused_with_the_largest_legal_value():
    with pytest.raises(TreeLimitsError, match=r"must be in \[2, 6\].*got num_draft_tokens=7"):
        Eagle2Spec(num_steps=5, topk=1, num_draft_tokens=7).build(None)
    with pytest.raises(PolicyConfigError, match="num_steps=0"):
        StaticPolicy.chain(0)


def test_plain_never_drafts():
    policy = PlainPolicy()
    batch = make_batch(2)
    assert not policy.should_speculate(batch).any()
    trees = grow_trees(RandomDrafter(0, 2), policy, batch)
    assert trees.num_nodes == 0
    assert policy.select_verify(trees, batch).shape == (2, 0)
    assert policy.select_frontier(CandidateTrees.empty(2), batch).shape == (2, 0)


def test_eagle2_expands_the_topk_best_of_the_newest_level():
    policy = Eagle2Spec(num_steps=3, topk=3, num_draft_tokens=9).build(None)
    trees = grow_trees(RandomDrafter(4, 5), policy, make_batch(5))
    assert trees.level_starts == [0, 3, 12]
    level = slice(3, 12)
    expanded = trees.parents[:, 12:].reshape(5, 3, 3)[:, :, 0]
    for row in range(5):
        best = 3 + np.argsort(-trees.path_log_confidence[row, level], kind="stable")[:3]
        assert expanded[row].tolist() == best.tolist()
    assert policy.name == "eagle2-3-3-9"
    assert policy.should_speculate(make_batch(5)).all()
