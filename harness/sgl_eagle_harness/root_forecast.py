"""What drafting is expected to yield before anything is drafted."""

from __future__ import annotations

import numpy as np

from sgl_eagle_harness.continuation import ContinuationModel, forecast_children
from sgl_eagle_harness.early_stop import merge_best, size_values
from sgl_eagle_harness.types import FloatArray, IntArray


def forecast_from_root(
    continuation: ContinuationModel, *, num_steps: int, topk: int, width: int, sizes: IntArray
) -> FloatArray:
    """Sums of the average tree's best probabilities.

    Measured averages serve if they are of the same branching; else levels are forecast one from
    the other, which loses the difference between easy and hard positions.

    Args:
        continuation: Fitted model, for at least `topk` children.
        num_steps: Levels to go to.
        topk: Children of every expanded node.
        width: Nodes expanded in each further draft step.
        sizes: [S] int64 verify sizes, root included, ascending.

    Returns:
        [num_steps, S] float64: after each number of levels, expected correct drafts of each size.
    """
    no_price = np.zeros((1, len(sizes)))
    ranked = continuation.ranked_probs
    if ranked and continuation.topk == topk:
        lists = [ranked[min(depth, len(ranked)) - 1] for depth in range(1, num_steps + 1)]
        best_of = (np.array([probs], np.float32) for probs in lists)
        return np.concatenate([size_values(best, sizes, no_price) for best in best_of])
    ratios = continuation.as_array()[:, :, :topk]
    edges = np.array(continuation.prob_edges)
    level = forecast_children(ratios, edges, 0, np.ones((1, 1)))
    best = np.empty((1, 0), np.float32)
    sums = []
    for depth in range(1, num_steps + 1):
        flat = level.reshape(1, -1)
        best = merge_best(best, flat.astype(np.float32), int(sizes[-1]) - 1)
        sums.append(size_values(best, sizes, no_price)[0])
        frontier = -np.sort(-flat, axis=1)[:, :width]
        level = forecast_children(ratios, edges, depth, frontier)
    return np.stack(sums)
