"""Scores that lean: what moves, what stays, and what a policy makes of it."""

import numpy as np
import pytest

from sgl_eagle.reference.leaning import LeaningDrafter, measure_moves
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.types import BatchContext, Children, TreeLimits

LOGS = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
BATCH = BatchContext(batch_size=1, context_len=np.array([5]), num_pending=np.array([1]))
POLICY = Eagle2Policy(limits=TreeLimits(num_steps=3, topk=2, num_draft_tokens=4))


class SameChildren:
    """Every node has the children 0, 1, 2, 3 with probabilities 0.4, 0.3, 0.2, 0.1."""

    def expand_root(self, topk):
        return self.expand(np.zeros((1, 1), np.int64), topk)

    def expand(self, handles, topk):
        shape = (1, handles.shape[1], topk)
        return Children(
            tokens=np.broadcast_to(np.arange(topk), shape),
            log_probs=np.broadcast_to(LOGS[:topk], shape),
            handles=np.arange(handles.shape[1] * topk).reshape(shape),
            valid=np.ones(shape, np.bool_),
        )


def lean(text, moves):
    drafter = LeaningDrafter(SameChildren(), text, np.array(moves), vocab_size=4)
    return grow_trees(drafter, POLICY, BATCH)


def scores(trees):
    found = {}
    for node in range(trees.num_nodes):
        parent = int(trees.parents[0, node])
        above = () if parent < 0 else next(path for path, at in found.items() if at[0] == parent)
        found[(*above, int(trees.tokens[0, node]))] = (node, trees.path_log_confidence[0, node])
    return {path: score for path, (_, score) in found.items()}


def test_without_a_move_nothing_changes():
    plain = grow_trees(SameChildren(), POLICY, BATCH)
    leant = lean([0, 1], [0.0] * 3)
    for name in ("tokens", "parents", "step_log_probs", "path_log_confidence"):
        assert (getattr(plain, name) == getattr(leant, name)).all()


def test_paths_gain_on_the_text_and_lose_off_it_by_their_depths_move():
    text = [0, 1, 0]
    plain, leant = scores(lean(text, [0.0] * 3)), scores(lean(text, [0.1, 0.05, 0.2]))
    moves = {path: leant[path] - plain[path] for path in plain.keys() & leant.keys()}
    expected = {(0,): 0.1, (1,): -0.1, (0, 1): 0.05, (0, 0): -0.05, (0, 1, 0): 0.2}
    assert {path: moves[path] for path in expected} == pytest.approx(expected, abs=1e-6)


def test_a_child_beyond_topk_moves_in_if_the_text_is_close_enough():
    assert (2,) not in scores(lean([2], [0.2] * 3))  # 0.3 to 0.2 is 0.405, and each moves 0.2
    assert (2,) in scores(lean([2], [0.21] * 3))
    assert (1,) not in scores(lean([1], [-0.21] * 3))


def test_probabilities_never_pass_1():
    assert max(scores(lean([0, 0, 0], [5.0] * 3)).values()) == 0.0


def test_moves_are_the_largest_of_each_depth():
    one, two = lean([0, 0, 0], [0.0] * 3), lean([0, 0, 0], [0.01, 0.02, 0.03])
    assert measure_moves(one, [two, one]) == pytest.approx([0.01, 0.02, 0.03], abs=1e-6)
    assert measure_moves(one, []).tolist() == [0.0] * 3
