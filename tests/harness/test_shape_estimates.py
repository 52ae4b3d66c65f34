"""Estimates of what each shape of a round yields and takes, from those that ran."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_eagle_harness.calibration import IdentityMap
from sgl_eagle_harness.shape_estimates import (
    MOST_LEARNT,
    PRIOR_ROUNDS,
    ROUNDS_COMPARED,
    DraftedRows,
    DraftYield,
    ShapeTimes,
    TimedRound,
)

SIZES = (1, 2, 4)
PRIOR = np.array([[0.0, 0.5, 0.6], [0.0, 0.5, 0.9], [0.0, 0.5, 1.1]])
MANY = 5000


def tree(*nodes):
    """Depths and path log-confidences, given as depth and confidence."""
    depths, probs = zip(*nodes, strict=True)
    return np.array(depths), np.log(np.array(probs)).astype(np.float32)


TREE = tree((1, 0.8), (1, 0.1), (2, 0.7), (2, 0.05), (3, 0.6), (3, 0.01))


def test_before_anything_is_seen_it_is_the_prior():
    assert DraftYield(PRIOR, SIZES).expected_drafts() == pytest.approx(PRIOR)
    assert DraftYield(PRIOR, SIZES).ratio == 1.0


def test_a_deep_tree_tells_of_every_shallower_and_smaller_one():
    found = DraftYield(PRIOR, SIZES)
    found.observe_trees([TREE] * MANY, IdentityMap())
    # The best 1 and 3 nodes of one level, of two, and of three.
    wanted = [[0.0, 0.8, 0.9], [0.0, 0.8, 1.6], [0.0, 0.8, 2.1]]
    assert found.expected_drafts() == pytest.approx(np.array(wanted), rel=0.02)


def test_a_depth_that_is_not_drafted_is_off_as_the_next_shallower_one():
    found = DraftYield(PRIOR, SIZES)
    shallow = tree((1, 0.8), (1, 0.1), (2, 0.2), (2, 0.05))
    found.observe_trees([shallow] * MANY, IdentityMap())
    drafts = found.expected_drafts()
    assert drafts[1] == pytest.approx([0.0, 0.8, 1.1], rel=0.02)
    assert drafts[2, 2] == pytest.approx(1.1 * (1.1 / 0.9), rel=0.02)


def rows_of(*kept, depth, size, times=MANY):
    """Rows that keep so many drafts, each as often."""
    reached = [times * sum(each > level for each in kept) for level in range(depth)]
    return DraftedRows(depth, size, times * len(kept), np.array(reached))


def test_verified_rows_scale_what_no_tree_has_told():
    found = DraftYield(PRIOR, SIZES)
    # As many rows as keep what the prior says of one level and of two.
    found.observe_rows([rows_of(*[2] * 3, *[1] * 3, *[0] * 4, depth=2, size=4)])
    assert found.ratio == pytest.approx(1.0, rel=0.02)
    assert found.expected_drafts() == pytest.approx(PRIOR, rel=0.02)
    found.observe_rows([rows_of(*[0] * 10, depth=2, size=4)])
    assert found.ratio == pytest.approx(0.5, rel=0.02)
    assert found.expected_drafts() == pytest.approx(PRIOR / 2, rel=0.02)


def test_rows_say_nothing_of_depths_and_sizes_of_which_the_prior_promises_nothing():
    prior = np.array([[0.0, 0.0, 0.6], [0.0, 0.5, 0.9]])
    found = DraftYield(prior, SIZES)
    found.observe_rows([rows_of(0, 0, depth=2, size=1), rows_of(1, 1, depth=1, size=2)])
    assert found.expected_drafts() == pytest.approx(prior)
    found.observe_rows([rows_of(1, 2, depth=2, size=2)])
    assert np.isfinite(found.expected_drafts()).all()


def test_rows_tell_how_much_of_their_depth_was_worth_it():
    found = DraftYield(PRIOR, SIZES)
    found.observe_rows([rows_of(0, 0, 0, 3, depth=3, size=4)])
    # A tree of one level would have kept one in the fourth row, of two levels two.
    assert found.expected_drafts()[:, 2] == pytest.approx([0.25, 0.5, 0.75], rel=0.02)


def test_a_shallower_tree_keeps_more_where_it_has_room_for_more_nodes():
    found = DraftYield(PRIOR, SIZES)
    found.observe_trees([TREE] * MANY, IdentityMap())
    # Of three nodes of three levels one is of the first, 0.8, and two are of the first two, 1.5; a
    # tree of one level has two there, 0.9, one of two levels three, 1.6.
    found.observe_rows([rows_of(0, 3, depth=3, size=4)])
    wanted = [0.5 * 0.9 / 0.8, 1.0 * 1.6 / 1.5, 1.5]
    assert found.expected_drafts()[:, 2] == pytest.approx(wanted, rel=0.02)


def test_a_depth_that_is_not_drafted_any_more_follows_the_shallower_ones():
    found = DraftYield(PRIOR, SIZES)
    found.observe_rows([rows_of(0, 0, 0, 3, depth=3, size=4, times=50)])
    poor = found.expected_drafts()[2, 2]
    found.observe_rows([rows_of(1, 2, depth=2, size=4)])
    assert found.expected_drafts()[1, 2] == pytest.approx(1.5, rel=0.03)
    assert found.expected_drafts()[2, 2] > 2 * poor


def test_without_news_it_returns_to_the_prior():
    found = DraftYield(PRIOR, SIZES)
    found.observe_trees([TREE] * 100, IdentityMap())
    assert found.expected_drafts()[2, 2] > 1.3
    found.age(100_000)
    assert found.expected_drafts() == pytest.approx(PRIOR, rel=1e-3)


nodes = st.tuples(st.integers(1, 3), st.floats(1e-4, 1.0))


@settings(deadline=None, max_examples=60)
@given(trees=st.lists(st.lists(nodes, min_size=1, max_size=9), min_size=0, max_size=6))
def test_estimates_rise_with_depth_and_size_and_stay_possible(trees):
    found = DraftYield(PRIOR, SIZES)
    found.observe_trees([tree(*sorted(each)) for each in trees] * 50, IdentityMap())
    drafts = found.expected_drafts()
    assert (np.diff(drafts, axis=0) >= 0).all()
    assert (np.diff(drafts, axis=1) >= 0).all()
    assert (drafts <= np.array([[1], [2], [3]])).all()
    assert (drafts <= np.array(SIZES) - 1).all()


EXPECTED_US = 10_000.0


def rounds(shape, *us, batch_size=4):
    return [
        TimedRound(batch_size=batch_size, shape=shape, elapsed_us=each, expected_us=EXPECTED_US)
        for each in us
    ]


def take_turns(times, us_of_shape, *, num_turns, num_rounds=ROUNDS_COMPARED + 1, slow=lambda _: 1):
    for turn in range(num_turns):
        for shape, us in us_of_shape.items():
            times.observe(rounds(shape, *[us * slow(turn)] * num_rounds))


def test_a_table_that_is_off_by_one_factor_says_nothing_about_what_happens_to_run():
    times = ShapeTimes(3, batch_edges=(1, 8))
    assert times.ratios(4).tolist() == [1.0, 1.0, 1.0]
    times.observe(rounds(0, *[8000.0] * 5000))
    assert times.ratios(4) == pytest.approx([0.8] * 3, rel=0.02)
    assert times.unknown_share(4).tolist() == [1.0, 1.0, 1.0]
    assert times.ratios(8).tolist() == [1.0, 1.0, 1.0]


def test_shapes_that_take_turns_are_known_against_each_other():
    times = ShapeTimes(3, batch_edges=(1, 8))
    take_turns(times, {0: 8000.0, 1: 12_000.0}, num_turns=100)
    found = times.ratios(7)
    assert found[1] / found[0] == pytest.approx(1.5, rel=0.02)
    assert found[0] < found[2] < found[1]
    assert times.unknown_share(4) == pytest.approx([0.0, 0.0, 1.0], abs=0.02)


def test_a_machine_that_is_busy_while_one_shape_runs_is_not_held_against_it():
    times = ShapeTimes(2, batch_edges=(1,))
    times.observe(rounds(0, *[4 * EXPECTED_US] * 500))
    times.observe(rounds(0, *[EXPECTED_US] * 500))
    times.observe(rounds(1, *[EXPECTED_US] * 500))
    found = times.ratios(1)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_machine_that_is_busy_for_some_turns_changes_little():
    times = ShapeTimes(2, batch_edges=(1,))
    take_turns(times, {0: 8000.0, 1: 12_000.0}, num_turns=30, slow=lambda turn: 1 + 3 * (turn % 2))
    found = times.ratios(4)
    assert found[1] / found[0] == pytest.approx(1.5, rel=0.05)


def try_out(times, *, before, trial, after):
    times.observe(rounds(0, *[before] * 20))
    times.observe(rounds(1, 2 * trial, *[trial] * 3))
    times.observe(rounds(0, *[after] * 20))


def test_a_trial_is_held_against_the_rounds_before_and_after_it_but_for_its_first():
    times = ShapeTimes(3, batch_edges=(1,))
    try_out(times, before=EXPECTED_US, trial=1.1 * EXPECTED_US, after=EXPECTED_US)
    found = times.ratios(4)
    assert found[1] / found[0] == pytest.approx(1 + 0.1 * 3 / (3 + PRIOR_ROUNDS))
    assert found[2] == found[0]
    assert (times.unknown_share(4) < 1).tolist() == [False, True, False]


def test_a_trial_in_whose_time_the_machine_changed_says_nothing():
    times = ShapeTimes(2, batch_edges=(1,))
    try_out(times, before=EXPECTED_US, trial=1.1 * EXPECTED_US, after=1.2 * EXPECTED_US)
    assert times.unknown_share(4).tolist() == [1.0, 1.0]


def test_one_comparison_cannot_say_more_than_a_quarter():
    times = ShapeTimes(2, batch_edges=(1,))
    take_turns(times, {0: EXPECTED_US, 1: 30 * EXPECTED_US}, num_turns=1)
    found = times.ratios(4)
    share = ROUNDS_COMPARED / (PRIOR_ROUNDS + ROUNDS_COMPARED)
    assert found[1] / found[0] == pytest.approx(1 + share * (MOST_LEARNT - 1))


def test_a_row_of_rounds_is_one_however_often_it_is_told_of():
    parts, whole = (ShapeTimes(2, batch_edges=(1,)) for _ in range(2))
    seen = [*rounds(0, *range(5000, 5010)), *rounds(1, *range(7000, 7012))]
    whole.observe(seen)
    for each in seen:
        parts.observe([each])
    found, wanted = parts.ratios(1), whole.ratios(1)
    assert found[1] / found[0] == pytest.approx(wanted[1] / wanted[0], rel=1e-3)
    assert wanted[1] > wanted[0]


def test_rounds_of_other_batch_sizes_are_not_compared():
    times = ShapeTimes(2, batch_edges=(1, 8))
    for _ in range(10):
        times.observe(rounds(0, *[5000.0] * 20))
        times.observe(rounds(1, *[EXPECTED_US] * 20, batch_size=8))
    assert times.unknown_share(4).tolist() == times.unknown_share(8).tolist() == [1.0, 1.0]


def test_one_round_that_hangs_says_little_about_its_shape():
    times = ShapeTimes(2, batch_edges=(1,))
    times.observe(rounds(0, 30e6))
    assert times.ratios(1)[0] < 1.13
