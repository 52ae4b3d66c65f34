"""Forecast of the next draft level from the calibrated probabilities of the frontier."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from sgl_eagle_harness.calibration import Calibration
from sgl_eagle_harness.confidence import NodeSample, sample_nodes
from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.errors import CalibrationError
from sgl_eagle_harness.records import Record
from sgl_eagle_harness.types import FloatArray, IntArray, TreeLimits

PROB_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
"""Bins of the parent's probability: a confident path tends to stay confident."""

PRIOR_NODES = 20.0
"""Weight of a depth's mean in its bins, in parents: thin bins lean on their depth."""

MAX_RANKED = 128
"""Nodes of the average tree that are remembered; larger trees are not worth verifying."""

_Share = Annotated[float, Field(ge=0, le=1)]


class ContinuationModel(Record):
    """Expected share of a node's probability that goes to each of its children.

    Attributes:
        prob_edges: [E] rising edges between the bins of the parent's probability.
        ratios: [D][E + 1][K] expected a(child of rank r) / a(parent); the first index is the
            parent's depth, the root having depth 0; deeper parents use the last.
        ranked_probs: [D][J] share of the positions fitted on at which the target accepted the node
            of the j-th highest probability among all nodes of depth at most 1, 2, ... Empty if not
            fitted.
    """

    prob_edges: tuple[float, ...]
    ratios: tuple[tuple[tuple[_Share, ...], ...], ...] = Field(min_length=1)
    ranked_probs: tuple[tuple[_Share, ...], ...] = ()

    @model_validator(mode="after")
    def _check_shape(self) -> ContinuationModel:
        if list(self.prob_edges) != sorted(set(self.prob_edges)):
            raise ValueError(f"prob_edges must rise, got {list(self.prob_edges)}")
        widths = {len(by_rank) for by_bin in self.ratios for by_rank in by_bin}
        counts = {len(by_bin) for by_bin in self.ratios}
        if counts != {len(self.prob_edges) + 1} or len(widths) != 1 or 0 in widths:
            raise ValueError(
                f"ratios must be [depth][{len(self.prob_edges) + 1}][topk] without gaps"
            )
        return self

    @property
    def topk(self) -> int:
        """K."""
        return len(self.ratios[0][0])

    def as_array(self) -> FloatArray:
        """The ratios as one array.

        Returns:
            [D, E + 1, K] float64.
        """
        return np.array(self.ratios)


def forecast_children(
    ratios: FloatArray, prob_edges: FloatArray, depth: int, probs: FloatArray
) -> FloatArray:
    """Expected probabilities of the children of some nodes.

    Args:
        ratios: [D, E + 1, K] from `ContinuationModel.as_array`.
        prob_edges: [E] float64.
        depth: Depth of the parents, 0 for the root.
        probs: [..., W] calibrated probabilities of the parents.

    Returns:
        [..., W, K], falling along K for each parent.
    """
    table = ratios[min(depth, len(ratios) - 1)]
    bins = np.searchsorted(prob_edges, probs, side="right")
    return np.asarray(table[bins] * probs[..., None])


def fit_continuation(
    trace: DenseTrace, calibration: Calibration, limits: TreeLimits
) -> ContinuationModel:
    """Average the calibrated children of every expanded node, by depth and parent's probability.

    Args:
        trace: Uncensored dense trace.
        calibration: Map that the policy will use.
        limits: Depth and branching of that policy; `limits.topk` children are forecast.

    Returns:
        The fitted model, for parents of depth 0 to `limits.num_steps - 1`.

    Raises:
        CalibrationError: If the trace is censored or holds fewer children than `limits.topk`.
    """
    if limits.topk > trace.header.topk:
        raise CalibrationError(
            f"topk must be at most the {trace.header.topk} children recorded, got {limits.topk}"
        )
    sample = sample_nodes(trace, limits)
    probs = calibration.sample_accept_probs(sample)
    above = np.where(sample.parents >= 0, probs[np.maximum(sample.parents, 0)], 1.0)
    bins = np.searchsorted(np.array(PROB_EDGES), above, side="right")
    num_bins = len(PROB_EDGES) + 1
    depths = []
    for depth in range(1, limits.num_steps + 1):
        at = sample.depths == depth
        if not at.any():
            break
        shape = (num_bins, limits.topk)
        mass = _sum_cells(bins[at], sample.ranks[at], above[at], shape)
        children = _sum_cells(bins[at], sample.ranks[at], probs[at], shape)
        counts = _sum_cells(bins[at], sample.ranks[at], np.ones(at.sum()), shape)
        overall = children.sum(axis=0) / np.maximum(mass.sum(axis=0), np.finfo(float).tiny)
        mean_mass = mass / np.maximum(counts, 1)
        # A bin whose parents were all mapped to 0 is as good as empty.
        prior = PRIOR_NODES * np.where(mass > 0, mean_mass, 1.0)
        ratio = np.clip((children + prior * overall) / (mass + prior), 0.0, 1.0)
        depths.append(tuple(tuple(row) for row in ratio.tolist()))
    return ContinuationModel(
        prob_edges=PROB_EDGES,
        ratios=tuple(depths),
        ranked_probs=_rank_means(trace, sample, probs, limits),
    )


def _rank_means(
    trace: DenseTrace, sample: NodeSample, probs: FloatArray, limits: TreeLimits
) -> tuple[tuple[float, ...], ...]:
    """How often the j-th most probable node of a position was accepted, for each number of levels.

    Not the mean of its probability: that takes all nodes of one confidence for equals, although the
    best of a tree are accepted a little more often than others that are as confident. The last
    positions of a text, where deep nodes have no outcome, are left out if others remain.

    Args:
        trace: P positions.
        sample: M nodes.
        probs: [M] float64 their accept probabilities.
        limits: Depth to go to.

    Returns:
        [num_steps][J].
    """
    whole = trace.last_row - np.arange(trace.num_positions) >= limits.num_steps - 1
    if not whole.any():
        whole[:] = True
    means = []
    for depth in range(1, limits.num_steps + 1):
        inside = whole[sample.rows] & (sample.depths <= depth)
        rows, values, accepted = sample.rows[inside], probs[inside], sample.accepted[inside]
        order = np.lexsort((-values, rows))
        starts = np.searchsorted(rows, rows)  # first node of the same row; rows ascend
        ranks = np.arange(len(rows)) - starts
        kept = ranks < MAX_RANKED
        sums = np.bincount(ranks[kept], accepted[order][kept])
        means.append(tuple((sums / whole.sum()).tolist()))
    return tuple(means)


def _sum_cells(
    bins: IntArray, ranks: IntArray, values: FloatArray, shape: tuple[int, int]
) -> FloatArray:
    flat = np.bincount(bins * shape[1] + ranks, values, shape[0] * shape[1])
    return np.asarray(flat, np.float64).reshape(shape)
