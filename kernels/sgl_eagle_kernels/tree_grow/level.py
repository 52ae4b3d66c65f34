"""What one draft step makes of a tree, and how its confidences are calibrated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

LEAST_REST = 1e-7
"""Smallest 1 - p of a step: float32 cannot tell a more certain draft from a certain one."""

MOST_EXPONENT = 80.0
"""exp overflows float32 beyond 88; the result is 0 either way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityCurve:
    """Acceptance is the path confidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTemperature:
    """The logit of each step's probability is divided by a temperature.

    Attributes:
        temperature: Of this depth, above 0.
    """

    temperature: float

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IsotonicCurve:
    """A rising curve over path log-confidence, linear between evenly spaced knots.

    Attributes:
        knots: [J] float32 acceptance, on the device of the tree; the last knot is at 0.
        lowest_log: Path log-confidence of the first knot, below 0.
    """

    knots: Tensor
    lowest_log: float

    def __post_init__(self) -> None:
        if not self.lowest_log < 0 or self.knots.dim() != 1 or len(self.knots) < 2:  # noqa: PLR2004
            raise ValueError(
                f"a curve needs two knots or more and lowest_log below 0, got "
                f"{list(self.knots.shape)} and {self.lowest_log}"
            )


Calibration = IdentityCurve | StepTemperature | IsotonicCurve
"""The map of one depth; all keep a child's acceptance at or below its parent's."""


class GrownLevel(NamedTuple):
    """The nodes of one level, children of one parent side by side.

    Attributes:
        path: [B, N] float32 path log-confidences.
        prob: [B, N] float32 calibrated acceptance probabilities, 0 for padding.
        frontier: [B, width] int64 columns of the level, best path first, lowest column first among
            equals; -1 is padding.
        frontier_path: [B, width] float32 path log-confidences of the frontier, minus infinity for
            padding: `parent_path` of the next level.
        frontier_prob: [B, width] float32, likewise.
    """

    path: Tensor
    prob: Tensor
    frontier: Tensor
    frontier_path: Tensor
    frontier_prob: Tensor
