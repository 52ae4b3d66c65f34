"""Which drafted nodes to verify: the best m of a tree are a tree.

Scores must not rise from parent to child. Equal scores are settled by draft order, in which parents
come first, so every prefix of the ranking is closed under parents even where a draft is certain.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sgl_eagle_harness.types import NO_NODE, BoolArray, Float32Array, FloatArray, IntArray

_Value = TypeVar("_Value", bound=np.generic)

_COLUMN_BITS = 32
_SORTED_WHOLE = 128
"""Keys of a row up to which sorting all is quicker than finding the best first."""
_ONE_BITS = np.int64(np.float32(1.0).view(np.int32))


def rank_log_scores(log_scores: Float32Array, valid: BoolArray) -> IntArray:
    """Sortable keys of log scores: ascending keys are descending scores, then ascending columns.

    Args:
        log_scores: [B, N] float32, at most 0.
        valid: [B, N] bool; invalid nodes rank last.

    Returns:
        [B, N] int64 keys; the low 32 bits are the column.
    """
    # Bit patterns of non-negative floats are ordered as the floats are; abs also settles -0.0.
    magnitude = np.where(valid, np.abs(log_scores), np.float32(np.inf)).astype(np.float32)
    return _with_columns(magnitude.view(np.int32).astype(np.int64))


def rank_probs(probs: FloatArray, valid: BoolArray) -> IntArray:
    """Sortable keys of probabilities: ascending keys are descending probabilities, then columns.

    Probabilities are compared in float32, whose rounding keeps the order of parents and children.

    Args:
        probs: [B, N] in [0, 1].
        valid: [B, N] bool; invalid nodes rank last.

    Returns:
        [B, N] int64 keys; the low 32 bits are the column.
    """
    rounded = np.abs(probs).astype(np.float32)
    bits = _ONE_BITS - rounded.view(np.int32).astype(np.int64)
    return _with_columns(np.where(valid, bits, _ONE_BITS + 1))


def take_best(keys: IntArray, count: int) -> IntArray:
    """The best columns of every row, best first.

    Args:
        keys: [B, N] from `rank_log_scores` or `rank_probs`.
        count: How many to take.

    Returns:
        [B, min(count, N)] int64 columns; invalid nodes may be among the last.
    """
    count = min(count, keys.shape[1])
    if count < keys.shape[1] and keys.shape[1] > _SORTED_WHOLE:
        keys = np.partition(keys, count, axis=1)[:, :count]
    ordered = np.sort(keys, axis=1)[:, :count]
    return np.asarray(ordered & ((1 << _COLUMN_BITS) - 1))


def at_columns(values: npt.NDArray[_Value], columns: IntArray) -> npt.NDArray[_Value]:
    """Values of some columns of every row.

    Args:
        values: [B, N].
        columns: [B, M] int64.

    Returns:
        [B, M]; as `np.take_along_axis`, which takes five times as long on one row.
    """
    return np.asarray(values[np.arange(len(values))[:, None], columns])


def keep_columns(columns: IntArray, kept: BoolArray) -> IntArray:
    """Selected columns in ascending order, padded at the end.

    Args:
        columns: [B, M] int64 in any order.
        kept: [B, M] bool, which of them are wanted.

    Returns:
        [B, M] int64 ascending, `NO_NODE` at the end.
    """
    last = np.iinfo(np.int64).max
    ordered = np.sort(np.where(kept, columns, last), axis=1)
    ordered[ordered == last] = NO_NODE
    return ordered


def select_rerank(
    log_scores: Float32Array, valid: BoolArray, num_nodes: int | npt.NDArray[np.int64]
) -> IntArray:
    """EAGLE-2's reranking: the best nodes of all levels together.

    Args:
        log_scores: [B, N] float32 path confidences as logs.
        valid: [B, N] bool.
        num_nodes: Nodes to keep, root excluded; one number or [B].

    Returns:
        [B, M] int64 columns, ascending, padded with `NO_NODE`, closed under parents.
    """
    most = int(np.max(num_nodes, initial=0))
    best = take_best(rank_log_scores(log_scores, valid), most)
    wanted = np.arange(best.shape[1]) < np.reshape(num_nodes, (-1, 1))
    return keep_columns(best, at_columns(valid, best) & wanted)


def _with_columns(bits: IntArray) -> IntArray:
    return np.asarray((bits << _COLUMN_BITS) | np.arange(bits.shape[1]))
