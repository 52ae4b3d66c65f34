"""What a learning policy is told between two refreshes."""

import numpy as np

from sgl_eagle_harness.policies.learning import VerifiedRows
from sgl_eagle_harness.policies.observation_log import ObservationLog


def nodes(*depths):
    logs = -np.arange(1, len(depths) + 1, dtype=np.float32)
    return np.array(depths, np.int64), logs, np.ones(len(depths))


def step(depths, sizes, correct):
    return VerifiedRows.of_rows(
        batch_size=len(depths),
        elapsed_us=None,
        depths=np.array(depths),
        num_draft_tokens=np.array(sizes),
        num_correct_drafts=np.array(correct),
    )


def test_a_refresh_is_due_after_so_many_steps_and_again_after_as_many_more():
    log = ObservationLog(refresh_steps=3)
    due = []
    for _ in range(7):
        due.append(log.add_step(step([1], [2], [1])))
        if due[-1]:
            assert len(log.take().steps) == 3
    assert due == [False, False, True, False, False, True, False]


def test_nodes_of_all_trees_follow_each_other_and_empty_trees_are_left_out():
    log = ObservationLog()
    for depths in ((1, 1, 2), (), (1,)):
        log.add_tree(*nodes(*depths))
    log.add_step(step([2], [4], [1]))
    seen = log.take()
    assert len(seen.trees) == 2
    depths, logs, accepted = seen.nodes()
    assert depths.tolist() == [1, 1, 2, 1]
    assert logs.tolist() == [-1, -2, -3, -1]
    assert accepted.tolist() == [1, 1, 1, 1]


def test_steps_without_trees_have_no_nodes():
    log = ObservationLog()
    log.add_step(step([0], [1], [0]))
    assert [len(part) for part in log.take().nodes()] == [0, 0, 0]


def test_rows_that_were_decoded_plainly_count_as_rows_but_yield_nothing():
    log = ObservationLog()
    log.add_step(step([3, 0], [8, 1], [2, 0]))
    log.add_step(step([], [], []))
    log.add_step(step([1], [2], [1]))
    seen = log.take()
    assert seen.num_rows == 3
    assert told(seen.drafted_rows()) == [(3, 8, 1, [1, 1, 0]), (1, 2, 1, [1])]
    log.add_step(step([2, 2], [2, 2], [0, 1]))
    log.add_step(step([2], [2], [2]))
    assert told(log.take().drafted_rows()) == [(2, 2, 3, [2, 1])]
    log.add_step(step([0], [1], [0]))
    assert log.take().drafted_rows() == ()


def told(groups):
    return [(*group[:3], group.reached.tolist()) for group in groups]


def test_rows_of_one_depth_and_size_are_told_of_together():
    rows = step([3, 0, 3, 3, 2], [8, 1, 8, 4, 8], [2, 0, 1, 3, 0])
    assert rows.groups == ((3, 8, [2, 1]), (0, 1, [0]), (3, 4, [3]), (2, 8, [0]))
    assert (rows.num_rows, rows.num_correct_drafts, rows.largest) == (5, 6, (3, 8))
    assert step([2, 2], [4, 4], [1, 0]).largest == (2, 4)
