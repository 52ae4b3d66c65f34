"""From the draft's confidence to the probability that the target accepts the whole path.

Every map keeps a(child) <= a(parent), so that the best m nodes are always a tree.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PrivateAttr, TypeAdapter, model_validator

from sgl_eagle_harness.confidence import NodeSample
from sgl_eagle_harness.errors import CalibrationError
from sgl_eagle_harness.records import Record, load_record, save_record
from sgl_eagle_harness.tree_build import at_columns
from sgl_eagle_harness.types import Float32Array, FloatArray, IntArray

CalibrationKind = Literal["identity", "temperature", "isotonic"]

_LEAST_REST = 1e-7
"""Smallest 1 - p of a step: float32 cannot tell a more certain draft from a certain one."""
_LARGEST_EXPONENT = np.float32(80)


class Calibration(ABC):
    """A monotone map from draft confidence to acceptance probability."""

    @abstractmethod
    def child_accept_probs(
        self,
        *,
        depth: int,
        path_log_confidence: Float32Array,
        step_log_probs: Float32Array,
        ranks: IntArray,
        parent_probs: FloatArray,
    ) -> FloatArray:
        """Map nodes of one depth, given what their parents were mapped to.

        Args:
            depth: Depth of all these nodes, at least 1.
            path_log_confidence: Float32 of any shape.
            step_log_probs: Float32 of the same shape.
            ranks: Integers that broadcast against it.
            parent_probs: Float64 of the same shape; ones for the root's children.

        Returns:
            Float64 of the same shape, in [0, parent_probs].
        """

    def accept_probs(
        self,
        path_log_confidence: Float32Array,
        step_log_probs: Float32Array,
        depths: IntArray,
        ranks: IntArray,
        parents: IntArray,
        known: FloatArray | None = None,
    ) -> FloatArray:
        """Map all nodes of B trees.

        Args:
            path_log_confidence: [B, N] float32.
            step_log_probs: [B, N] float32.
            depths: [N] int64, at least 1.
            ranks: [N] int64.
            parents: [B, N] int64 columns, `NO_NODE` for the root's children; parents come first.
            known: [B, N0] float64, the result for the first N0 columns if it is at hand.

        Returns:
            [B, N] float64 in [0, 1], child <= parent; 0 for padding.
        """
        num_rows, num_nodes = path_log_confidence.shape
        start = 0 if known is None else known.shape[1]
        probs = np.empty((num_rows, num_nodes))
        if known is not None:
            probs[:, :start] = known
        bounds = np.flatnonzero(np.diff(depths[start:])) + 1 + start
        for begin, end in zip([start, *bounds], [*bounds, num_nodes], strict=True):
            if begin == end:
                continue
            level = slice(begin, end)
            depth = int(depths[begin])
            if depth == 1:
                above = np.ones((num_rows, end - begin))
            else:
                above = at_columns(probs, np.maximum(parents[:, level], 0))
            probs[:, level] = self.child_accept_probs(
                depth=depth,
                path_log_confidence=path_log_confidence[:, level],
                step_log_probs=step_log_probs[:, level],
                ranks=ranks[level],
                parent_probs=above,
            )
        return probs

    def sample_accept_probs(self, sample: NodeSample) -> FloatArray:
        """Map the nodes of a trace.

        Args:
            sample: M nodes.

        Returns:
            [M] float64.
        """
        probs = np.ones(len(sample.depths))
        for depth in range(1, int(sample.depths.max(initial=0)) + 1):
            at = np.flatnonzero(sample.depths == depth)
            probs[at] = self.child_accept_probs(
                depth=depth,
                path_log_confidence=sample.path_log_confidence[at],
                step_log_probs=sample.step_log_probs[at],
                ranks=sample.ranks[at],
                parent_probs=probs[sample.parents[at]] if depth > 1 else np.ones(len(at)),
            )
        return probs


class IdentityMap(Record, Calibration):
    """Takes the draft at its word: a(v) is the path confidence.

    Attributes:
        kind: Tag of the record.
    """

    kind: Literal["identity"] = "identity"

    def child_accept_probs(  # noqa: D102  (Calibration)
        self,
        *,
        depth: int,  # noqa: ARG002
        path_log_confidence: Float32Array,
        step_log_probs: Float32Array,  # noqa: ARG002
        ranks: IntArray,  # noqa: ARG002
        parent_probs: FloatArray,
    ) -> FloatArray:
        return np.asarray(np.minimum(np.exp(path_log_confidence), parent_probs))


class TemperatureMap(Record, Calibration):
    """Sequential temperature scaling: the logit of each step's probability over a temperature.

    The step event is binary, accepted or not given that the parent was, so its logit is what one
    scales; a(v) is the parent's times the result. Order among siblings is kept.

    Attributes:
        kind: Tag of the record.
        temperatures: One per depth from 1 on; deeper nodes use the last. Above 1 pulls
            probabilities to one half.
    """

    kind: Literal["temperature"] = "temperature"
    temperatures: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = Field(
        min_length=1
    )

    def child_accept_probs(  # noqa: D102  (Calibration)
        self,
        *,
        depth: int,
        path_log_confidence: Float32Array,  # noqa: ARG002
        step_log_probs: Float32Array,
        ranks: IntArray,  # noqa: ARG002
        parent_probs: FloatArray,
    ) -> FloatArray:
        temperature = self.temperatures[min(depth, len(self.temperatures)) - 1]
        return np.asarray(parent_probs * scale_step(step_log_probs, temperature))


class IsotonicMap(Record, Calibration):
    """A rising curve per depth, linear between knots that are evenly spaced in path confidence.

    Attributes:
        kind: Tag of the record.
        lowest_log: Path log confidence of the first knot; the last knot is at 0. Below the first
            knot the curve is flat.
        curves: [D][J] acceptance probabilities at the knots, one curve a depth from 1 on; deeper
            nodes use the last.
    """

    kind: Literal["isotonic"] = "isotonic"
    lowest_log: float = Field(lt=0, allow_inf_nan=False)
    curves: tuple[tuple[Annotated[float, Field(ge=0, le=1)], ...], ...] = Field(min_length=1)

    _rows: tuple[bytes, ...] = PrivateAttr(default=())
    """The curves as float64 bytes: an array view of them costs nothing in the decode loop."""

    @model_validator(mode="after")
    def _check_curves(self) -> IsotonicMap:
        num_knots = len(self.curves[0])
        for depth, curve in enumerate(self.curves, 1):
            if len(curve) != num_knots or num_knots < 2:  # noqa: PLR2004 (a segment has two ends)
                raise ValueError(
                    f"curves must have the same number of knots, at least 2, got {len(curve)} at "
                    f"depth {depth} and {num_knots} at depth 1"
                )
            if any(b < a for a, b in itertools.pairwise(curve)):
                raise ValueError(f"curves must not fall, got a fall at depth {depth}")
        self._rows = tuple(np.array(curve).tobytes() for curve in self.curves)
        return self

    def child_accept_probs(  # noqa: D102  (Calibration)
        self,
        *,
        depth: int,
        path_log_confidence: Float32Array,
        step_log_probs: Float32Array,  # noqa: ARG002
        ranks: IntArray,  # noqa: ARG002
        parent_probs: FloatArray,
    ) -> FloatArray:
        knots = np.frombuffer(self._rows[min(depth, len(self._rows)) - 1])
        place = path_place(path_log_confidence, self.lowest_log, len(knots))
        left = place.astype(np.int64)
        share = place - left
        right = np.minimum(left + 1, len(knots) - 1)
        curve = knots[left] * (1 - share) + knots[right] * share
        # Padding has no path; the flat end of the curve must not make it look acceptable.
        curve = np.where(np.isneginf(path_log_confidence), 0.0, curve)
        return np.asarray(np.minimum(curve, parent_probs))


CalibrationSpec = Annotated[IdentityMap | TemperatureMap | IsotonicMap, Field(discriminator="kind")]
"""Any calibration, as files hold it."""


class CalibrationFile(Record):
    """A calibration with what it was fitted on.

    Attributes:
        schema_version: Version of this layout.
        calibration: The map.
        target_sha256: Digest of the target whose acceptance was observed.
        draft_sha256: Digest of the draft.
        temperature: Sampling temperature of the text; maps of another regime do not apply.
        num_positions: Positions fitted on.
        workloads: Workloads fitted on.
    """

    schema_version: Literal[1] = 1
    calibration: CalibrationSpec
    target_sha256: str
    draft_sha256: str
    temperature: float = Field(ge=0)
    num_positions: int = Field(ge=1)
    workloads: tuple[str, ...]


def load_calibration_file(path: Path) -> CalibrationFile:
    """Read a calibration.

    Args:
        path: JSON file.

    Returns:
        The checked record.

    Raises:
        CalibrationError: If the file cannot be used; names file and field.
    """
    return load_record(path, CalibrationFile, CalibrationError, schema_version=1)


def save_calibration_file(path: Path, record: CalibrationFile) -> None:
    """Write a calibration, whole or not at all.

    Args:
        path: JSON file.
        record: What to write.

    Raises:
        OutputError: If the file cannot be written.
    """
    save_record(path, record)


def calibration_from_json(text: str) -> Calibration:
    """Parse one calibration.

    Args:
        text: JSON with its `kind`.

    Returns:
        The map.

    Raises:
        pydantic.ValidationError: If the text is not a calibration.
    """
    adapter: TypeAdapter[IdentityMap | TemperatureMap | IsotonicMap] = TypeAdapter(CalibrationSpec)
    return adapter.validate_json(text)


def scale_step(step_log_probs: Float32Array, temperature: float) -> Float32Array:
    """Divide the logit of step probabilities by a temperature.

    Args:
        step_log_probs: Float32 natural logs, at most 0.
        temperature: Above 0.

    Returns:
        Float32 probabilities of the same shape; 0 stays 0 and a half stays a half.
    """
    rest = np.maximum(1 - np.exp(step_log_probs), np.float32(_LEAST_REST))
    against = (np.log(rest) - step_log_probs) / np.float32(temperature)
    # exp of a finite number overflows float32 beyond 88, with a warning; that of infinity does not.
    against = np.where(against > _LARGEST_EXPONENT, np.float32(np.inf), against)
    return np.asarray(1 / (1 + np.exp(against)), np.float32)


def path_place(path_log_confidence: Float32Array, lowest_log: float, num_knots: int) -> FloatArray:
    """Where path confidences lie on evenly spaced knots.

    Args:
        path_log_confidence: Float32 of any shape.
        lowest_log: Log confidence of knot 0; the last knot is at 0.
        num_knots: J.

    Returns:
        Float64 of the same shape, in [0, J - 1].
    """
    clipped = np.clip(path_log_confidence, lowest_log, 0.0).astype(np.float64)
    return np.asarray((clipped - lowest_log) * ((num_knots - 1) / -lowest_log))
