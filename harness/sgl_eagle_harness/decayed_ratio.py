"""What happened against what was expected: a ratio that starts at one and forgets slowly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_eagle_harness.errors import CalibrationError
from sgl_eagle_harness.types import FloatArray


class DecayedRatio:
    """Observed over expected amounts in each of some cells, shrunk to one.

    A cell's ratio is `(prior + observed) / (prior + expected)`, both sums decayed. Without
    observations it is exactly one; a cell that is no longer observed returns to one. Memory is two
    numbers a cell, however much is observed.
    """

    def __init__(self, shape: tuple[int, ...], *, prior: float, half_life: float) -> None:
        """Start with nothing observed.

        Args:
            shape: Shape of the cells.
            prior: Expected amount that counts as observed exactly as expected, above 0.
            half_life: Age, in the caller's unit, at which an observation counts half; above 0.

        Raises:
            CalibrationError: If `prior` or `half_life` is not above 0.
        """
        for name, value in (("prior", prior), ("half_life", half_life)):
            if not value > 0:
                raise CalibrationError(f"{name} must be above 0, got {name}={value}")
        self._prior, self._half_life = prior, half_life
        self._observed = np.zeros(shape)
        self._expected = np.zeros(shape)

    @property
    def num_cells(self) -> int:
        """Cells, which is what memory grows with."""
        return self._observed.size

    @property
    def expected(self) -> FloatArray:
        """Expected amounts that still count, one a cell."""
        return self._expected.copy()

    def values(self, towards: npt.ArrayLike = 1.0) -> FloatArray:
        """The ratios.

        Args:
            towards: What cells without observations are, where something better than one is
                known; broadcasts against them.

        Returns:
            float64 of the shape of the cells, above 0.
        """
        believed = self._prior * np.asarray(towards)
        return np.asarray((believed + self._observed) / (self._prior + self._expected))

    def decay(self, age: float) -> None:
        """Let what was observed grow older.

        Args:
            age: In the unit of the half-life.
        """
        factor = 0.5 ** (age / self._half_life)
        self._observed *= factor
        self._expected *= factor

    def add(
        self, cells: npt.NDArray[np.int64], observed: npt.ArrayLike, expected: npt.ArrayLike
    ) -> None:
        """Count observations.

        Args:
            cells: [M] int64, flat indices of cells; may repeat.
            observed: [M] amounts, at least 0.
            expected: [M] amounts, at least 0.
        """
        self._observed += self._gather(cells, observed)
        self._expected += self._gather(cells, expected)

    def _gather(self, cells: npt.NDArray[np.int64], amounts: npt.ArrayLike) -> FloatArray:
        weights = np.broadcast_to(np.asarray(amounts, np.float64), cells.shape)
        flat = np.bincount(cells, weights, self.num_cells)
        return np.asarray(flat, np.float64).reshape(self._observed.shape)
