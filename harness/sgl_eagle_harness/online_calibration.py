"""Calibration that learns while an engine serves.

The map of a policy file, or a built-in one, is the prior. For each depth and each stretch of path
confidence the estimator keeps how many nodes the target accepted against how many the prior
expected, both decayed, and multiplies the prior by their ratio. Before the first observation the
map is the prior itself, so it is as good as the prior by construction; with observations it moves
only as far as they carry it.

Letters: M observed nodes, D depths, S stretches, J knots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression

from sgl_eagle_harness.calibration import Calibration, IdentityMap, IsotonicMap
from sgl_eagle_harness.calibration_fit import LOWEST_LOG, NUM_KNOTS
from sgl_eagle_harness.decayed_ratio import DecayedRatio
from sgl_eagle_harness.errors import CalibrationError
from sgl_eagle_harness.types import Float32Array, FloatArray, IntArray

NUM_STRETCHES = 48
"""A quarter of a natural logarithm each: within one, a ratio hardly changes."""


LEAST_SHARE = 0.05
"""Of the path confidence, that an observed map starts with at least."""


@dataclass(frozen=True, kw_only=True)
class OnlineCalibrationConfig:
    """How fast the map learns and forgets.

    Attributes:
        prior_accepts: Accepted nodes that the prior counts for in each cell.
        half_life_nodes: Observed nodes after which an observation counts half.
    """

    prior_accepts: float = 8.0
    half_life_nodes: float = 200_000.0


class OnlineCalibration:
    """Refines an isotonic or identity map by accepted and rejected nodes.

    Attributes:
        num_observed: Nodes observed so far, decayed or not.
    """

    def __init__(
        self,
        prior: Calibration,
        *,
        num_depths: int,
        config: OnlineCalibrationConfig | None = None,
    ) -> None:
        """Start at the prior.

        Args:
            prior: A map of path confidence and depth alone.
            num_depths: D; deeper nodes count with the last.
            config: How fast to learn.

        Raises:
            CalibrationError: If the prior is of another kind, or `num_depths` below 1.
        """
        if not isinstance(prior, IdentityMap | IsotonicMap):
            raise CalibrationError(
                "a map is refined online only if it is of kind identity or isotonic, got "
                f"{type(prior).__name__}"
            )
        if num_depths < 1:
            raise CalibrationError(f"num_depths must be at least 1, got {num_depths=}")
        config = config or OnlineCalibrationConfig()
        self._prior, self._num_depths = prior, num_depths
        self._ratio = DecayedRatio(
            (num_depths, NUM_STRETCHES),
            prior=config.prior_accepts,
            half_life=config.half_life_nodes,
        )
        self._knot_logs = np.linspace(LOWEST_LOG, 0.0, NUM_KNOTS)
        curves = [_curve_of(prior, depth, self._knot_logs) for depth in range(1, num_depths + 1)]
        # What the prior calls impossible, no ratio could correct.
        self._prior_curves = np.maximum(curves, LEAST_SHARE * np.exp(self._knot_logs))
        self.num_observed = 0

    @property
    def num_cells(self) -> int:
        """Cells of the estimator, which bound its memory."""
        return self._ratio.num_cells

    def observe(
        self, depths: IntArray, path_log_confidence: Float32Array, accepted: FloatArray
    ) -> None:
        """Learn from nodes whose outcome is known.

        Args:
            depths: [M] int64, at least 1.
            path_log_confidence: [M] float32, finite.
            accepted: [M] in [0, 1], 1 where the target accepted the whole path.
        """
        if not len(depths):
            return
        rows = np.minimum(depths, self._num_depths) - 1
        place = _place(path_log_confidence, NUM_KNOTS - 1)
        knots = np.rint(place).astype(np.int64)
        expected = self._prior_curves[rows, knots]
        stretches = np.minimum(_place(path_log_confidence, NUM_STRETCHES), NUM_STRETCHES - 1)
        self._ratio.decay(float(len(depths)))
        self._ratio.add(rows * NUM_STRETCHES + stretches.astype(np.int64), accepted, expected)
        self.num_observed += len(depths)

    def calibration(self) -> Calibration:
        """The map as it stands.

        Returns:
            The prior before the first observation, else an isotonic map: one curve a depth, which
            never falls and which `IsotonicMap` keeps at or below the parent's probability.
        """
        if not self.num_observed:
            return self._prior
        centres = LOWEST_LOG * (1 - (np.arange(NUM_STRETCHES) + 0.5) / NUM_STRETCHES)
        spread = np.diff(np.linspace(0, NUM_KNOTS, NUM_STRETCHES + 1))
        curves = []
        for prior, ratio, expected in zip(
            self._prior_curves, self._ratio.values(), self._ratio.expected, strict=True
        ):
            raw = np.clip(prior * np.interp(self._knot_logs, centres, ratio), 0.0, 1.0)
            # Where the corrected curve would fall, the better observed side decides.
            weights = np.interp(self._knot_logs, centres, (1.0 + expected) / spread)
            rising = isotonic_regression(raw, weights=weights).x
            curves.append(tuple(np.maximum.accumulate(np.clip(rising, 0.0, 1.0)).tolist()))
        return IsotonicMap(lowest_log=LOWEST_LOG, curves=tuple(curves))


def _place(path_log_confidence: Float32Array, num_parts: int) -> FloatArray:
    clipped = np.clip(path_log_confidence, LOWEST_LOG, 0.0).astype(np.float64)
    return np.asarray((clipped - LOWEST_LOG) * (num_parts / -LOWEST_LOG))


def _curve_of(prior: Calibration, depth: int, knot_logs: FloatArray) -> FloatArray:
    # [J] the prior at the knots; parents are as probable as can be.
    logs = knot_logs.astype(np.float32)
    return prior.child_accept_probs(
        depth=depth,
        path_log_confidence=logs,
        step_log_probs=logs,
        ranks=np.zeros(len(logs), np.int64),
        parent_probs=np.ones(len(logs)),
    )
