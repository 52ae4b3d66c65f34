"""Measured latencies of one device and model pair, interpolated and never extrapolated.

Letters: Mb batch sizes, Mn token counts, Mc context lengths measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression

from sgl_eagle_harness.errors import CostTableError, CostTableRangeError
from sgl_eagle_harness.records import ModelIdentity, Record
from sgl_eagle_harness.types import FloatArray, IntArray


class CostSetup(Record):
    """Everything a latency depends on; tables of another setup are refused.

    Attributes:
        device: Device name, e.g. "NVIDIA H200" or the CPU's model name.
        tensor_parallel_size: Devices that share one model.
        dtype: Dtype of target and draft, e.g. "bfloat16".
        attention_backend: Attention implementation.
        engine: What ran, e.g. "reference" or "sglang".
        engine_version: Its version.
        num_threads: CPU threads of the engine.
        target: Target model.
        draft: Draft model.
    """

    device: str
    tensor_parallel_size: int
    dtype: str
    attention_backend: str
    engine: str
    engine_version: str
    num_threads: int
    target: ModelIdentity
    draft: ModelIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldoutError:
    """How far interpolation lies from measurements that it was not given.

    Attributes:
        num_cells: Grid cells predicted from their neighbours; 0 if no axis has an inner point.
        median_relative: Median of |predicted - measured| / measured; NaN without cells.
        max_relative: Largest of the same; NaN without cells.
    """

    num_cells: int
    median_relative: float
    max_relative: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostGrid:
    """Latency of one kind of pass on a grid.

    Attributes:
        kind: Name for messages: "target", "draft", "draft_extend" or "launch".
        batch_size: [Mb] int64, strictly increasing.
        num_tokens: [Mn] int64 per request, strictly increasing.
        context_len: [Mc] int64, strictly increasing.
        us: [Mb, Mn, Mc] float64, measured median latencies in microseconds.
    """

    kind: str
    batch_size: IntArray
    num_tokens: IntArray
    context_len: IntArray
    us: FloatArray
    _planes: dict[int, FloatArray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        axes = {name: getattr(self, name) for name in ("batch_size", "num_tokens", "context_len")}
        for name, axis in axes.items():
            least = 0 if name == "context_len" else 1
            if axis.ndim != 1 or not len(axis) or axis[0] < least or (np.diff(axis) <= 0).any():
                raise CostTableError(
                    f"{self.kind}.{name} must be strictly increasing from at least {least}, got "
                    f"{axis.tolist()}"
                )
        shape = tuple(len(axis) for axis in axes.values())
        if self.us.shape != shape:
            raise CostTableError(
                f"{self.kind}.us must have shape {shape} (batch_size, num_tokens, context_len), "
                f"got {self.us.shape}"
            )
        if not (np.isfinite(self.us) & (self.us > 0)).all():
            at = np.unravel_index(int(np.argmin(np.isfinite(self.us) & (self.us > 0))), shape)
            raise CostTableError(
                f"{self.kind}.us must be finite and positive, got {self.us[at]} at index "
                f"{[int(i) for i in at]}"
            )

    def at(
        self, batch_size: int, num_tokens: npt.ArrayLike, context_len: npt.ArrayLike
    ) -> FloatArray:
        """Interpolate, exact at grid points whose medians are monotone.

        Medians are first made non-decreasing along `num_tokens` (least squares): more tokens
        never take less time, and noise must not make a larger tree look cheaper.

        Args:
            batch_size: Requests in the pass.
            num_tokens: Integers of any shape.
            context_len: Integers of a shape that broadcasts against `num_tokens`.

        Returns:
            float64 microseconds of the broadcast shape.

        Raises:
            CostTableRangeError: If any point lies outside the grid.
        """
        plane = self._planes.get(batch_size)
        if plane is None:
            plane = self._planes[batch_size] = self._plane(batch_size)
        tokens = np.asarray(num_tokens)
        contexts = np.asarray(context_len)
        _check_range(self.kind, "num_tokens", tokens, self.num_tokens)
        _check_range(self.kind, "context_len", contexts, self.context_len)
        row = tokens - self.num_tokens[0]
        if len(self.context_len) == 1:
            return np.asarray(plane[row, 0] + 0.0 * contexts)
        left = np.searchsorted(self.context_len[1:-1], contexts, side="right")
        start, stop = self.context_len[left], self.context_len[left + 1]
        share = (contexts - start) / (stop - start)
        low, high = plane[row, left], plane[row, left + 1]
        return np.asarray((1 - share) * low + share * high)

    def leave_out_error(self) -> HoldoutError:
        """Predict every inner grid value of tokens and of context from the others.

        Returns:
            Relative errors over all cells predicted that way.
        """
        errors = []
        for points, axis in ((self.num_tokens, 1), (self.context_len, 2)):
            for index in range(1, len(points) - 1):
                rest = np.delete(np.arange(len(points)), index)
                grid = CostGrid(
                    kind=self.kind,
                    batch_size=self.batch_size,
                    num_tokens=points[rest] if axis == 1 else self.num_tokens,
                    context_len=points[rest] if axis != 1 else self.context_len,
                    us=np.take(self.us, rest, axis=axis),
                )
                tokens = points[index] if axis == 1 else self.num_tokens
                contexts = points[index] if axis != 1 else self.context_len
                for batch, measured in zip(self.batch_size, self.us, strict=True):
                    left_out = np.take(measured, index, axis=axis - 1)
                    predicted = grid.at(int(batch), tokens, contexts)
                    errors.append(np.abs(predicted - left_out) / left_out)
        if not errors:
            return HoldoutError(num_cells=0, median_relative=np.nan, max_relative=np.nan)
        flat = np.concatenate(errors)
        return HoldoutError(
            num_cells=len(flat),
            median_relative=float(np.median(flat)),
            max_relative=float(flat.max()),
        )

    def _plane(self, batch_size: int) -> FloatArray:
        """Latencies at one batch size for every integer token count on the axis.

        Args:
            batch_size: Requests in the pass.

        Returns:
            [num_tokens[-1] - num_tokens[0] + 1, Mc] float64.
        """
        _check_range(self.kind, "batch_size", np.asarray(batch_size), self.batch_size)
        batches = self.batch_size.astype(np.float64)
        weights = np.array([np.interp(batch_size, batches, row) for row in np.eye(len(batches))])
        counts = np.arange(self.num_tokens[0], self.num_tokens[-1] + 1)
        columns = []
        for context in range(len(self.context_len)):
            monotone = np.stack(
                [isotonic_regression(self.us[b, :, context]).x for b in range(len(batches))]
            )
            columns.append(np.interp(counts, self.num_tokens, weights @ monotone))
        return np.stack(columns, axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """All latencies that the objective needs, per step kind.

    Attributes:
        setup: What was measured.
        target: One target pass over num_tokens tokens a request; 1 is plain decoding.
        draft: One draft step over num_tokens frontier nodes a request, LM head and topk included.
        draft_extend: Bringing the draft's cache up to date with num_tokens pending tokens, LM
            head for the last of them and topk included: it also proposes the root's children.
        decide_us: One policy decision after a draft step, host synchronisation included.
        verify_select_us: Choosing and laying out the tree that is verified.
        extends_every_step: Whether the engine ends each step, plain ones too, with a draft-extend
            over as many tokens as it verified. Its time then belongs to `verify_us` and
            `decode_us`, and nothing is left to catch up with.
        drafts_ahead: Whether the engine runs a draft step at full width while the policy decides
            about the level before: a level takes the longer of the two, and a stop wastes the rest
            of the step that runs.
        rounds_in_a_row: Whether rounds were timed as they follow each other while serving; if not,
            each was timed alone, with the host's time that serving hides.
        launch: The host's own time of launching a round that verifies num_tokens tokens, drafting
            included; 1 is a plain round, without catching up. None where launching is computing.
    """

    setup: CostSetup
    target: CostGrid
    draft: CostGrid
    draft_extend: CostGrid
    decide_us: float
    verify_select_us: float
    extends_every_step: bool = False
    drafts_ahead: bool = False
    rounds_in_a_row: bool = False
    launch: CostGrid | None = None

    def __post_init__(self) -> None:
        for name in ("decide_us", "verify_select_us"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise CostTableError(f"{name} must be finite and at least 0, got {value}")

    def verify_us(
        self, batch_size: int, num_tokens: npt.ArrayLike, context_len: npt.ArrayLike
    ) -> FloatArray:
        """Latency of one target pass over draft trees, and of the draft-extend that it entails.

        Args:
            batch_size: Requests verified together.
            num_tokens: Tree nodes a request, root included; any shape.
            context_len: Tokens before the root; broadcasts against `num_tokens`.

        Returns:
            float64 microseconds of the broadcast shape.

        Raises:
            CostTableRangeError: If any point lies outside the grid.
        """
        us = self.target.at(batch_size, num_tokens, context_len)
        if not self.extends_every_step:
            return us
        return np.asarray(us + self.draft_extend.at(batch_size, num_tokens, context_len))

    def decode_us(self, batch_size: int, context_len: npt.ArrayLike) -> FloatArray:
        """Latency of one plain decoding step, and of the draft-extend that it entails.

        Args:
            batch_size: Requests decoded together.
            context_len: Tokens before the root; any shape.

        Returns:
            float64 microseconds of the shape of `context_len`.

        Raises:
            CostTableRangeError: If any point lies outside the grid.
        """
        return self.verify_us(batch_size, 1, context_len)

    def draft_step_us(
        self, batch_size: int, width: npt.ArrayLike, context_len: npt.ArrayLike
    ) -> FloatArray:
        """Latency of one draft step.

        Args:
            batch_size: Requests drafted together.
            width: Nodes expanded a request; any shape.
            context_len: Tokens before the root; broadcasts against `width`.

        Returns:
            float64 microseconds of the broadcast shape.

        Raises:
            CostTableRangeError: If any point lies outside the grid.
        """
        return self.draft.at(batch_size, width, context_len)

    def draft_level_us(
        self, batch_size: int, width: npt.ArrayLike, context_len: npt.ArrayLike
    ) -> FloatArray:
        """Latency of one more draft level: a step, and the decision to run it.

        Args:
            batch_size: Requests drafted together.
            width: Nodes expanded a request; any shape.
            context_len: Tokens before the root; broadcasts against `width`.

        Returns:
            float64 microseconds of the broadcast shape.

        Raises:
            CostTableRangeError: If any point lies outside the grid.
        """
        step_us = self.draft_step_us(batch_size, width, context_len)
        if self.drafts_ahead:
            return np.asarray(np.maximum(step_us, self.decide_us))
        return np.asarray(step_us + self.decide_us)

    def wasted_draft_us(self, batch_size: int, context_len: npt.ArrayLike) -> FloatArray:
        """How long verification waits for the draft step that runs when a policy stops.

        Beyond the decision to stop and the choice of what to verify, which pass in the meantime.

        Args:
            batch_size: Requests drafted together.
            context_len: Tokens before the root; any shape.

        Returns:
            float64 microseconds of the shape of `context_len`; 0 if no step runs by then.

        Raises:
            CostTableRangeError: If any point lies outside the grid.
        """
        if not self.drafts_ahead:
            return np.zeros(np.shape(context_len))
        step_us = self.draft_step_us(batch_size, self.draft.num_tokens[-1], context_len)
        return np.asarray(np.maximum(step_us - self.decide_us - self.verify_select_us, 0.0))

    def stop_us(self, batch_size: int, context_len: npt.ArrayLike) -> FloatArray:
        """Latency of ending drafting before its last level.

        Args:
            batch_size: Requests drafted together.
            context_len: Tokens before the root; any shape.

        Returns:
            float64 microseconds of the shape of `context_len`; 0 for an engine that waits for
            decisions, where a level's own counts for the one that ends it.

        Raises:
            CostTableRangeError: If any point lies outside the grid.
        """
        wasted_us = self.wasted_draft_us(batch_size, context_len)
        return wasted_us + self.decide_us if self.drafts_ahead else wasted_us

    def draft_extend_us(
        self, batch_size: int, num_pending: npt.ArrayLike, context_len: npt.ArrayLike
    ) -> FloatArray:
        """Latency of one draft-extend.

        Args:
            batch_size: Requests extended together.
            num_pending: Tokens the draft has not seen, a request; any shape.
            context_len: Tokens before the root; broadcasts against `num_pending`.

        Returns:
            float64 microseconds of the broadcast shape.

        Raises:
            CostTableRangeError: If any point lies outside the grid.
        """
        return self.draft_extend.at(batch_size, num_pending, context_len)

    def draft_catch_up_us(
        self, batch_size: int, num_pending: npt.ArrayLike, context_len: npt.ArrayLike
    ) -> FloatArray:
        """Latency of draft-extends, before a step, in chunks of at most the largest measured size.

        An engine that decoded plainly for a while has more pending tokens than any extend that
        was measured; it processes them in chunks, and so does this sum.

        Args:
            batch_size: Requests extended together.
            num_pending: Tokens the draft has not seen, a request, at least 1; any shape.
            context_len: Tokens before the root; broadcasts against `num_pending`.

        Returns:
            float64 microseconds of the broadcast shape.

        Raises:
            CostTableRangeError: If a context or a remainder lies outside the grid.
        """
        pending = np.asarray(num_pending)
        if self.extends_every_step:
            return np.zeros(np.broadcast_shapes(pending.shape, np.shape(context_len)))
        largest = int(self.draft_extend.num_tokens[-1])
        full, rest = np.divmod(pending - 1, largest)
        cost = self.draft_extend.at(batch_size, rest + 1, context_len)
        if full.any():
            cost = cost + full * self.draft_extend.at(batch_size, largest, context_len)
        return cost

    def require_setup(self, setup: CostSetup) -> None:
        """Refuse to be used on another setup.

        Args:
            setup: What is about to run.

        Raises:
            CostTableError: Naming every field that differs.
        """
        differing = [
            f"{name}: measured on {_shown(getattr(self.setup, name))}, running "
            f"{_shown(getattr(setup, name))}"
            for name in CostSetup.model_fields
            if getattr(self.setup, name) != getattr(setup, name)
        ]
        if differing:
            raise CostTableError(
                f"the cost table was measured on another setup; {'; '.join(differing)}"
            )


def _shown(value: object) -> str:
    return str(value) if isinstance(value, ModelIdentity) else repr(value)


def _check_range(kind: str, name: str, values: npt.NDArray[Any], axis: IntArray) -> None:
    if values.size == 0:
        return
    least, most = values.min(), values.max()
    if least < axis[0] or most > axis[-1]:
        wrong = least if least < axis[0] else most
        raise CostTableRangeError(
            f"{kind}: {name} must be in the measured range [{axis[0]}, {axis[-1]}], got "
            f"{name}={wrong}; measure a wider grid, costs are not extrapolated"
        )
