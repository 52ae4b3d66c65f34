"""Fitting calibration maps on dense traces."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression

from sgl_eagle_harness.calibration import (
    Calibration,
    CalibrationKind,
    IdentityMap,
    IsotonicMap,
    TemperatureMap,
    path_place,
    scale_step,
)
from sgl_eagle_harness.confidence import NodeSample, sample_nodes
from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.errors import CalibrationError
from sgl_eagle_harness.reliability import (
    Metric,
    expected_calibration_error,
    negative_log_likelihood,
)
from sgl_eagle_harness.types import FloatArray, TreeLimits

MIN_ACCEPTED = 20
"""Accepted nodes without which a fit says more about chance than about the draft."""

TEMPERATURE_GRID: FloatArray = np.logspace(-1, 1, 41)
"""The grid of DSpark's sequential temperature scaling (SGLang 0.5.23, `dspark_sts_fit.py`)."""

LOWEST_LOG = -12.0
NUM_KNOTS = 193
"""Knots every 1/16 in log confidence, down to a path confidence of 6e-6."""


def fit_calibration(
    kind: CalibrationKind,
    trace: DenseTrace,
    limits: TreeLimits,
    *,
    metric: Metric = "nll",
    weights: FloatArray | None = None,
) -> Calibration:
    """Fit a map on the nodes of an uncensored dense trace.

    Prompts to hold out are the caller's to leave out (`DenseTrace.select`).

    Args:
        kind: Which map.
        trace: Dense trace.
        limits: Depth and branching of the policies that will use the map.
        metric: What sequential temperature scaling minimises; the published method uses "ece",
            which is noisy on few positions.
        weights: [P, T] float64 weight of each node; None weighs all alike.

    Returns:
        The fitted map.

    Raises:
        CalibrationError: If the trace is censored, the kind unknown, or too few nodes were
            accepted.
    """
    sample = sample_nodes(trace, limits, weights=weights)
    num_accepted = float(sample.accepted.sum())
    if kind != "identity" and num_accepted < MIN_ACCEPTED:
        raise CalibrationError(
            f"calibration needs at least {MIN_ACCEPTED} accepted nodes, got {num_accepted:.1f} in "
            f"{trace.num_positions} positions; record more text"
        )
    if kind == "identity":
        return IdentityMap()
    if kind == "temperature":
        return fit_temperatures(sample, metric=metric)
    if kind == "isotonic":
        return fit_isotonic(sample)
    raise CalibrationError(f"kind must be identity, temperature or isotonic, got {kind!r}")


def fit_temperatures(sample: NodeSample, *, metric: Metric = "nll") -> TemperatureMap:
    """Sequential temperature scaling, left to right, earlier depths frozen.

    Args:
        sample: Nodes to fit on.
        metric: Minimised for the cumulative product of each depth.

    Returns:
        One temperature per depth of the sample.
    """
    loss = {"nll": negative_log_likelihood, "ece": expected_calibration_error}[metric]
    probs = np.ones(len(sample.depths))
    temperatures: list[float] = []
    for depth in range(1, int(sample.depths.max()) + 1):
        at = np.flatnonzero(sample.depths == depth)
        above = probs[sample.parents[at]] if depth > 1 else np.ones(len(at))
        logs, accepted, weights = sample.step_log_probs[at], sample.accepted[at], sample.weights[at]
        if accepted.sum() < MIN_ACCEPTED and temperatures:
            best = temperatures[-1]
        else:
            losses = [
                loss(above * scale_step(logs, temperature), accepted, weights)
                for temperature in TEMPERATURE_GRID
            ]
            best = float(TEMPERATURE_GRID[int(np.argmin(losses))])
        temperatures.append(best)
        probs[at] = above * scale_step(logs, best)
    return TemperatureMap(temperatures=tuple(temperatures))


def fit_isotonic(sample: NodeSample) -> IsotonicMap:
    """Isotonic regression of acceptance on path log confidence, per depth.

    Nodes are first gathered at the nearest knot; a depth with too few accepted nodes gets the
    curve of all depths together.

    Args:
        sample: Nodes to fit on.

    Returns:
        One curve per depth of the sample.
    """
    nearest = np.rint(path_place(sample.path_log_confidence, LOWEST_LOG, NUM_KNOTS)).astype(int)
    pooled = _rising_curve(nearest, sample.accepted, sample.weights)
    curves = []
    for depth in range(1, int(sample.depths.max()) + 1):
        at = sample.depths == depth
        thin = sample.accepted[at].sum() < MIN_ACCEPTED
        curve = (
            pooled if thin else _rising_curve(nearest[at], sample.accepted[at], sample.weights[at])
        )
        curves.append(tuple(curve.tolist()))
    return IsotonicMap(lowest_log=LOWEST_LOG, curves=tuple(curves))


def _rising_curve(
    knots: npt.NDArray[np.int64], accepted: FloatArray, weights: FloatArray
) -> FloatArray:
    mass = np.bincount(knots, weights, NUM_KNOTS)
    seen = np.flatnonzero(mass > 0)
    means = np.bincount(knots, weights * accepted, NUM_KNOTS)[seen] / mass[seen]
    fitted = isotonic_regression(means, weights=mass[seen]).x
    curve = np.interp(np.arange(NUM_KNOTS), seen, fitted)
    # Rounding of interpolation must not make a curve fall.
    return np.maximum.accumulate(np.clip(curve, 0.0, 1.0))
