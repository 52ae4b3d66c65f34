"""How well probabilities match outcomes: Brier score, calibration error, AUC, reliability bins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import rankdata

from sgl_eagle_harness.errors import CalibrationError
from sgl_eagle_harness.types import FloatArray, IntArray

Metric = Literal["nll", "ece"]
Binning = Literal["equal_mass", "equal_width"]

NUM_BINS = 15
_Z95 = 1.959963984540054
_LEAST_PROB = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Nodes whose probabilities lie close together.

    Attributes:
        lowest: Smallest probability in the bin.
        highest: Largest probability in the bin.
        mean_prob: Mean probability.
        accept_rate: Share of nodes whose whole path was accepted.
        num_nodes: Nodes in the bin.
        interval_low: Lower end of the 95 % Wilson interval of `accept_rate`.
        interval_high: Its upper end.
    """

    lowest: float
    highest: float
    mean_prob: float
    accept_rate: float
    num_nodes: int
    interval_low: float
    interval_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """All scores of one map on one set of nodes.

    Attributes:
        num_nodes: Nodes scored.
        brier: Mean squared error; lower is better.
        nll: Mean negative log likelihood in nats; lower is better.
        ece: Expected calibration error over bins of equal mass.
        ece_equal_width: The same over bins of equal width.
        auc: Probability that an accepted node has a higher score than a rejected one; NaN if there
            is only one kind.
        bins: Reliability diagram, bins of equal mass.
    """

    num_nodes: int
    brier: float
    nll: float
    ece: float
    ece_equal_width: float
    auc: float
    bins: tuple[ReliabilityBin, ...]


def assess(probs: FloatArray, accepted: FloatArray, *, num_bins: int = NUM_BINS) -> Reliability:
    """Score probabilities against outcomes.

    Args:
        probs: [M] float64 in [0, 1].
        accepted: [M] float64 in [0, 1].
        num_bins: Bins of calibration error and diagram.

    Returns:
        All scores.

    Raises:
        CalibrationError: If there is nothing to score or a probability is out of range.
    """
    if not len(probs):
        raise CalibrationError("reliability needs at least one node, got none")
    if not ((probs >= 0) & (probs <= 1)).all():
        raise CalibrationError(
            f"probabilities must be in [0, 1], got {probs.min()} to {probs.max()}"
        )
    return Reliability(
        num_nodes=len(probs),
        brier=float(np.mean((probs - accepted) ** 2)),
        nll=negative_log_likelihood(probs, accepted),
        ece=expected_calibration_error(probs, accepted, num_bins=num_bins),
        ece_equal_width=expected_calibration_error(
            probs, accepted, num_bins=num_bins, binning="equal_width"
        ),
        auc=area_under_curve(probs, accepted),
        bins=reliability_bins(probs, accepted, num_bins=num_bins),
    )


def negative_log_likelihood(
    probs: FloatArray, accepted: FloatArray, weights: FloatArray | None = None
) -> float:
    """Mean negative log likelihood of outcomes.

    Args:
        probs: [M] in [0, 1]; clipped to [1e-6, 1 - 1e-6], so that one certain error stays finite.
        accepted: [M] in [0, 1].
        weights: [M], at least 0; None weighs all alike.

    Returns:
        Nats a node.
    """
    clipped = np.clip(probs.astype(np.float64), _LEAST_PROB, 1 - _LEAST_PROB)
    losses = -(accepted * np.log(clipped) + (1 - accepted) * np.log1p(-clipped))
    return float(np.average(losses, weights=weights))


def expected_calibration_error(
    probs: FloatArray,
    accepted: FloatArray,
    weights: FloatArray | None = None,
    *,
    num_bins: int = NUM_BINS,
    binning: Binning = "equal_mass",
) -> float:
    """Mean distance between probability and frequency over bins.

    Args:
        probs: [M] in [0, 1].
        accepted: [M] in [0, 1].
        weights: [M], at least 0; None weighs all alike.
        num_bins: How many bins.
        binning: Bins with as many nodes each, or bins as wide each.

    Returns:
        Weighted mean of |mean probability - mean outcome|.
    """
    mass = np.ones(len(probs)) if weights is None else weights
    bins = _assign_bins(probs, num_bins, binning)
    gaps = np.bincount(bins, mass * (probs - accepted), num_bins)
    return float(np.abs(gaps).sum() / mass.sum())


def area_under_curve(probs: FloatArray, accepted: FloatArray) -> float:
    """Probability that an accepted node outscores a rejected one, ties counting half.

    Args:
        probs: [M] scores.
        accepted: [M] in [0, 1]; above 0.5 counts as accepted.

    Returns:
        Mann-Whitney's U over its maximum; NaN if all nodes are of one kind.
    """
    positive = accepted > 0.5  # noqa: PLR2004 (outcomes are 0 or 1, or probabilities)
    num_positive = int(positive.sum())
    num_negative = len(probs) - num_positive
    if not num_positive or not num_negative:
        return float("nan")
    rank_sum = rankdata(probs)[positive].sum()
    u = rank_sum - num_positive * (num_positive + 1) / 2
    return float(u / (num_positive * num_negative))


def reliability_bins(
    probs: FloatArray,
    accepted: FloatArray,
    *,
    num_bins: int = NUM_BINS,
    binning: Binning = "equal_mass",
) -> tuple[ReliabilityBin, ...]:
    """The points of a reliability diagram.

    Args:
        probs: [M] in [0, 1].
        accepted: [M] in [0, 1].
        num_bins: How many bins; empty ones are left out.
        binning: Bins with as many nodes each, or bins as wide each.

    Returns:
        Bins in rising order of probability.
    """
    bins = _assign_bins(probs, num_bins, binning)
    found = []
    for index in np.unique(bins):
        inside = bins == index
        num_nodes = int(inside.sum())
        rate = float(accepted[inside].mean())
        low, high = wilson_interval(rate, num_nodes)
        found.append(
            ReliabilityBin(
                lowest=float(probs[inside].min()),
                highest=float(probs[inside].max()),
                mean_prob=float(probs[inside].mean()),
                accept_rate=rate,
                num_nodes=num_nodes,
                interval_low=low,
                interval_high=high,
            )
        )
    return tuple(found)


def wilson_interval(rate: float, count: int) -> tuple[float, float]:
    """95 % interval of a proportion that stays inside [0, 1].

    Args:
        rate: Observed share in [0, 1].
        count: Observations, at least 1.

    Returns:
        Lower and upper end.
    """
    z2 = _Z95**2
    centre = (rate + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z95 / (1 + z2 / count) * np.sqrt(rate * (1 - rate) / count + z2 / (4 * count**2))
    return max(0.0, float(centre - half)), min(1.0, float(centre + half))


def _assign_bins(probs: FloatArray, num_bins: int, binning: Binning) -> IntArray:
    if binning == "equal_width":
        return np.minimum((probs * num_bins).astype(np.int64), num_bins - 1)
    # Equal scores share a bin: their common rank decides.
    ranks = rankdata(probs, method="min") - 1
    return np.asarray(ranks * num_bins // len(probs)).astype(np.int64)
