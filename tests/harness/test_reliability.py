from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_eagle_harness.errors import CalibrationError
from sgl_eagle_harness.reliability import (
    area_under_curve,
    assess,
    expected_calibration_error,
    negative_log_likelihood,
    reliability_bins,
    wilson_interval,
)


@given(seed=st.integers(0, 1000), levels=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_auc_equals_the_count_of_ordered_pairs(seed, levels):
    rng = np.random.default_rng(seed)
    probs = rng.integers(0, levels, 30) / levels
    accepted = (rng.random(30) < 0.4).astype(float)
    high, low = probs[accepted == 1], probs[accepted == 0]
    if not len(high) or not len(low):
        assert np.isnan(area_under_curve(probs, accepted))
        return
    pairs = (high[:, None] > low) + 0.5 * (high[:, None] == low)
    assert area_under_curve(probs, accepted) == pytest.approx(pairs.mean())


def test_a_perfect_and_an_inverted_score():
    accepted = np.array([0.0, 0.0, 1.0, 1.0])
    assert area_under_curve(np.array([0.1, 0.2, 0.8, 0.9]), accepted) == 1.0
    assert area_under_curve(np.array([0.9, 0.8, 0.2, 0.1]), accepted) == 0.0


def test_ece_by_hand_for_both_binnings():
    probs = np.array([0.1, 0.1, 0.3, 0.9])
    accepted = np.array([0.0, 1.0, 0.0, 1.0])
    # Two bins of equal mass: {0.1, 0.1}, {0.3, 0.9}; of equal width: {0.1, 0.1, 0.3}, {0.9}.
    by_mass = expected_calibration_error(probs, accepted, num_bins=2)
    assert by_mass == pytest.approx((abs(0.2 - 1.0) + abs(1.2 - 1.0)) / 4)
    by_width = expected_calibration_error(probs, accepted, num_bins=2, binning="equal_width")
    assert by_width == pytest.approx((abs(0.5 - 1.0) + abs(0.9 - 1.0)) / 4)


def test_calibrated_scores_have_little_error_and_biased_ones_their_bias():
    rng = np.random.default_rng(0)
    probs = rng.random(60_000)
    accepted = (rng.random(60_000) < probs).astype(float)
    good = assess(probs, accepted)
    assert good.ece < 0.01
    assert good.ece_equal_width < 0.01
    assert good.brier == pytest.approx(1 / 6, abs=0.005)
    biased = assess(np.minimum(probs + 0.2, 1.0), accepted)
    assert biased.ece == pytest.approx(0.18, abs=0.01)
    assert biased.auc == pytest.approx(good.auc, abs=0.02)


def test_bins_partition_the_nodes_and_intervals_cover():
    rng = np.random.default_rng(1)
    probs = rng.random(5000) ** 3
    accepted = (rng.random(5000) < probs).astype(float)
    bins = reliability_bins(probs, accepted, num_bins=10)
    assert sum(item.num_nodes for item in bins) == 5000
    assert [item.num_nodes for item in bins] == [500] * 10
    assert all(a.highest <= b.lowest for a, b in itertools.pairwise(bins))
    covered = [item.interval_low <= item.mean_prob <= item.interval_high for item in bins]
    assert sum(covered) >= 8


def test_equal_scores_share_a_bin():
    probs = np.array([0.5] * 7 + [0.9])
    bins = reliability_bins(probs, np.zeros(8), num_bins=4)
    assert [item.num_nodes for item in bins] == [7, 1]


@pytest.mark.parametrize(
    ("rate", "count", "low", "high"),
    [(0.0, 10, 0.0, 0.2775), (1.0, 10, 0.7225, 1.0), (0.5, 100, 0.4038, 0.5962)],
)
def test_wilson_interval(rate, count, low, high):
    assert wilson_interval(rate, count) == pytest.approx((low, high), abs=1e-4)


def test_weights_and_clipping():
    probs, accepted = np.array([0.5, 0.0]), np.array([1.0, 1.0])
    assert negative_log_likelihood(probs, accepted, np.array([1.0, 0.0])) == pytest.approx(
        np.log(2)
    )
    assert np.isfinite(negative_log_likelihood(probs, accepted))
    assert expected_calibration_error(probs, accepted, np.array([1.0, 0.0])) == pytest.approx(0.5)


def test_unfit_input_is_refused():
    with pytest.raises(CalibrationError, match="at least one node"):
        assess(np.array([]), np.array([]))
    with pytest.raises(CalibrationError, match=r"must be in \[0, 1\], got 0.5 to 1.5"):
        assess(np.array([0.5, 1.5]), np.array([0.0, 1.0]))
