"""Path sums of recorded nodes: what the draft, or the target, gives a whole path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.errors import CalibrationError
from sgl_eagle_harness.types import Float32Array, FloatArray, IntArray, TreeLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample:
    """The nodes of a dense trace that calibration may learn from, one after the other.

    Only nodes inside the limits and inside the recorded text: what lies beyond its end has no
    outcome.

    Attributes:
        rows: [M] int64, trace position of each node, ascending.
        depths: [M] int64, at least 1.
        ranks: [M] int64.
        parents: [M] int64, index into the sample, -1 for the root's children.
        step_log_probs: [M] float32.
        path_log_confidence: [M] float32.
        accepted: [M] float64 in [0, 1]: 1 where the target accepted the whole path, 0 where not;
            above temperature 0 the target's own probability of the path, whose mean is the same
            and whose noise is lower.
        weights: [M] float64, at least 0.
    """

    rows: IntArray
    depths: IntArray
    ranks: IntArray
    parents: IntArray
    step_log_probs: Float32Array
    path_log_confidence: Float32Array
    accepted: FloatArray
    weights: FloatArray


def sum_path_logs(
    log_probs: Float32Array, parents: npt.NDArray[Any], depths: npt.NDArray[Any]
) -> Float32Array:
    """Add the logs from the root to every node, in float32 as `CandidateTrees.append` does.

    Args:
        log_probs: [P, T] float32 logs of single steps.
        parents: [P, T] integer columns, negative for the root's children.
        depths: [P, T] integers, 0 for padding.

    Returns:
        [P, T] float32, minus infinity for padding.
    """
    sums = np.where(depths > 0, log_probs, np.float32(-np.inf)).astype(np.float32)
    for depth in range(2, int(depths.max(initial=0)) + 1):
        rows, columns = np.nonzero(depths == depth)
        sums[rows, columns] += sums[rows, parents[rows, columns]]
    return sums


def sample_nodes(
    trace: DenseTrace, limits: TreeLimits, *, weights: FloatArray | None = None
) -> NodeSample:
    """Collect the nodes of a trace that a policy with these limits can draft.

    Args:
        trace: Uncensored dense trace.
        limits: Depth and branching to stay within.
        weights: [P, T] float64 weight of each node; None weighs all alike.

    Returns:
        Nodes in row order; parents come first.

    Raises:
        CalibrationError: If the trace is censored.
    """
    if trace.header.censored:
        raise CalibrationError(
            "calibration needs an uncensored trace: censored must be false, got true"
        )
    parents = trace.parents.astype(np.int64)
    rows = np.arange(trace.num_positions)[:, None]
    kept = (trace.depths > 0) & (trace.depths <= limits.num_steps) & (trace.ranks < limits.topk)
    kept &= rows + trace.depths - 1 <= trace.last_row[:, None]
    for depth in range(2, limits.num_steps + 1):
        at = np.nonzero(trace.depths == depth)
        kept[at] &= kept[at[0], parents[at]]
    index = np.cumsum(kept).reshape(kept.shape) - 1
    at = np.nonzero(kept)
    above = parents[at]
    if trace.target_log_probs is None:
        accepted = trace.on_path[at].astype(np.float64)
    else:
        sums = sum_path_logs(trace.target_log_probs, parents, trace.depths)
        accepted = np.exp(sums[at].astype(np.float64))
    return NodeSample(
        rows=at[0],
        depths=trace.depths[at].astype(np.int64),
        ranks=trace.ranks[at].astype(np.int64),
        parents=np.where(above >= 0, index[at[0], above], above),
        step_log_probs=trace.step_log_probs[at],
        path_log_confidence=sum_path_logs(trace.step_log_probs, parents, trace.depths)[at],
        accepted=accepted,
        weights=np.ones(len(above)) if weights is None else weights[at],
    )
