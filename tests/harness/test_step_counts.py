from __future__ import annotations

import numpy as np
import pytest

from sgl_eagle_harness.step_counts import StepCounts


def add_steps(counts, *, correct):
    counts.add_step(
        wanted=np.array([True, True, False]),
        speculated=np.array([True, True, False]),
        num_drafted=np.array([12, 20, 0]),
        num_draft_tokens=np.array([4, 8, 1]),
        depths=np.array([2, 3, 0]),
        num_correct_drafts=np.array(correct),
    )


def test_sums_and_ratios_by_hand():
    counts = StepCounts()
    assert counts.accept_length is None
    assert counts.accept_rate is None
    add_steps(counts, correct=[2, 5, 0])
    add_steps(counts, correct=[0, 1, 0])
    assert (counts.step_ct, counts.row_ct, counts.speculated_ct) == (2, 6, 4)
    assert (counts.drafted_ct, counts.proposed_ct, counts.correct_ct) == (64, 20, 8)
    assert counts.accept_token_ct == 14
    assert counts.accept_length == pytest.approx(14 / 6)
    assert counts.accept_rate == pytest.approx(8 / 20)
    assert counts.verify_size_ct == {1: 2, 4: 2, 8: 2}
    assert counts.depth_ct == {0: 2, 2: 2, 3: 2}


@pytest.mark.parametrize("correct", [[2, 0, 1], []])
@pytest.mark.parametrize(
    ("wanted", "drafted", "size", "depth"), [(1, 20, 8, 3), (0, 0, 1, 0), (1, 0, 1, 0)]
)
def test_trees_of_one_size_count_as_trees_of_any(correct, wanted, drafted, size, depth):
    alike, each = StepCounts(), StepCounts()
    num_rows = len(correct)
    alike.add_step_of_one_size(
        wanted=bool(wanted),
        num_drafted=drafted,
        num_draft_tokens=size,
        depth=depth,
        num_correct_drafts=correct,
    )
    each.add_step(
        wanted=np.full(num_rows, bool(wanted)),
        speculated=np.full(num_rows, depth > 0),
        num_drafted=np.full(num_rows, drafted),
        num_draft_tokens=np.full(num_rows, size),
        depths=np.full(num_rows, depth),
        num_correct_drafts=np.array(correct, np.int64),
    )
    assert alike == each


def test_drafts_that_were_wanted_and_missing_are_counted():
    counts = StepCounts()
    nothing = np.zeros(3, np.int64)
    counts.add_step(
        wanted=np.array([True, True, False]),
        speculated=np.array([True, False, False]),
        num_drafted=np.array([4, 0, 0]),
        num_draft_tokens=np.array([2, 1, 1]),
        depths=np.array([1, 0, 0]),
        num_correct_drafts=nothing,
    )
    assert (counts.invalid_row_ct, counts.speculated_ct, counts.proposed_ct) == (1, 1, 1)


def test_differences_leave_the_earlier_copy_alone():
    counts = StepCounts()
    add_steps(counts, correct=[1, 0, 0])
    earlier = counts.copy()
    add_steps(counts, correct=[0, 3, 0])
    counts.tier_switch_ct += 2
    later = counts.since(earlier)
    assert (later.step_ct, later.correct_ct, later.tier_switch_ct) == (1, 3, 2)
    assert later.verify_size_ct == {1: 1, 4: 1, 8: 1}
    assert earlier.step_ct == 1
    assert earlier.verify_size_ct == {1: 1, 4: 1, 8: 1}
