"""Estimates of what each shape of a round yields and takes, from those that ran."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_eagle_harness.calibration import IdentityMap
from sgl_eagle_harness.shape_estimates import DraftYield, ShapeTimes

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


def test_verified_rows_scale_what_no_tree_has_told():
    found = DraftYield(PRIOR, SIZES)
    ones = np.ones(MANY, np.int64)
    found.observe_rows(2 * ones, 2 * ones, np.repeat([0, 1], [MANY // 10, MANY - MANY // 10]))
    assert found.ratio == pytest.approx(1.0, rel=0.02)
    found.observe_rows(2 * ones, 2 * ones, 0 * ones)
    assert found.ratio == pytest.approx(0.5, rel=0.02)
    assert found.expected_drafts() == pytest.approx(PRIOR / 2, rel=0.02)


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


def test_a_shape_that_never_ran_is_off_as_those_that_did():
    times = ShapeTimes(3, batch_edges=(1, 8))
    assert times.ratios(4).tolist() == [1.0, 1.0, 1.0]
    times.observe(4, 0, elapsed_us=np.full(5000, 8000.0), expected_us=10_000.0)
    found = times.ratios(4)
    assert found == pytest.approx([0.8] * 3, rel=0.02)
    times.observe(4, 1, elapsed_us=np.full(5000, 12_000.0), expected_us=10_000.0)
    found = times.ratios(7)
    assert found[0] == pytest.approx(0.8, rel=0.02)
    assert found[1] == pytest.approx(1.2, rel=0.02)
    assert found[0] < found[2] < found[1]
    assert times.ratios(8).tolist() == [1.0, 1.0, 1.0]
    assert times.unknown_share(4) == pytest.approx([0.0, 0.0, 1.0], abs=0.02)


def test_one_round_that_hangs_says_little_about_its_shape():
    times = ShapeTimes(2, batch_edges=(1,))
    times.observe(1, 0, elapsed_us=np.array([30e6]), expected_us=10_000.0)
    assert times.ratios(1)[0] < 1.12
