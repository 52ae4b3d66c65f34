"""When one more draft level pays: the forecast rise of the pruned value against its cost.

Everything here works on the best probabilities of a tree alone, as a falling list. New nodes push
out old ones, so what a level adds is the rise of the best prefix, not the level's mass.

Letters: B rows, J listed probabilities, S verify sizes, C widths on offer, K children.
"""

from __future__ import annotations

import numpy as np

from sgl_eagle_harness.types import Float32Array, FloatArray, IntArray


def merge_best(best: Float32Array, added: Float32Array, count: int) -> Float32Array:
    """Add probabilities to a falling list and keep its head.

    Args:
        best: [..., J] float32, falling.
        added: [..., A] float32 in any order.
        count: Length to keep.

    Returns:
        [..., min(count, J + A)] float32, falling.
    """
    # Negative, so that the fast ascending sort puts the best first.
    joined = np.concatenate([-best, -added], axis=-1)
    joined.sort(axis=-1)
    return np.asarray(-joined[..., :count])


def size_values(best: Float32Array, sizes: IntArray, verify_price: FloatArray) -> FloatArray:
    """Value of verifying the best nodes, for each verify size.

    Args:
        best: [..., J] float32, falling probabilities; missing ones count as 0.
        sizes: [S] int64 verify sizes, root included, ascending.
        verify_price: [..., S] float64, price of verifying each size in tokens.

    Returns:
        [..., S] float64: expected accepted drafts less the price.
    """
    sums = np.zeros((*best.shape[:-1], best.shape[-1] + 1))
    np.cumsum(best, axis=-1, out=sums[..., 1:])
    return np.asarray(sums[..., np.minimum(sizes, sums.shape[-1]) - 1] - verify_price)


def forecast_gain(
    best: Float32Array,
    children: Float32Array,
    widths: IntArray,
    sizes: IntArray,
    verify_price: FloatArray,
) -> FloatArray:
    """Forecast rise of the pruned value if the first w frontier nodes are expanded.

    Args:
        best: [B, J] float32, falling probabilities of the tree so far; J < sizes[-1].
        children: [B, W, K] float32 forecast probabilities of each frontier node's children.
        widths: [C] int64 numbers of nodes that may be expanded, ascending, at most W.
        sizes: [S] int64 verify sizes, root included, ascending.
        verify_price: [B, S] float64, price of verifying each size in tokens.

    Returns:
        [B, C] float64 tokens, before the price of drafting.
    """
    num_rows = len(best)
    count = int(sizes[-1]) - 1
    # Negative, as in `merge_best`; list 0 is the tree as it stands, padded with zeros.
    lists = np.zeros((num_rows, 1 + len(widths), count), np.float32)
    np.negative(best, out=lists[:, 0, : best.shape[1]])
    added, done = -children, 0
    for index, width in enumerate(widths.tolist()):
        wider = added[:, done:width].reshape(num_rows, -1)
        joined = np.concatenate([lists[:, index], wider], axis=1)
        joined.sort(axis=1)
        lists[:, index + 1] = joined[:, :count]
        done = width
    values = size_values(-lists, sizes, verify_price[:, None, :]).max(axis=-1)
    return np.asarray(values[:, 1:] - values[:, :1])


def choose_width(gains: FloatArray, draft_price: FloatArray, *, may_stop: bool) -> IntArray:
    """Width of the next draft step.

    Args:
        gains: [B, C] float64 forecast rises, in tokens.
        draft_price: [B, C] float64 price of the step at each width, in tokens.
        may_stop: Whether drafting may end; else the best width is taken at any price.

    Returns:
        [B] int64 index of the width; -1 stops. Among equals the narrowest is taken.
    """
    net = gains - draft_price
    chosen = net.argmax(axis=1)
    if may_stop:
        chosen = np.where(net.max(axis=1) > 0, chosen, -1)
    return np.asarray(chosen)
