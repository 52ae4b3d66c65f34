"""Attention whose result does not depend on the other tokens of its pass.

Plain decoding reads a token alone, verification reads it among the nodes of a tree, and a recording
reads it in one long pass. The usual kernels then add the same terms in different orders, in half
precision some results round the other way, and what was recorded is no longer exactly what the
engine does. Here every sum over keys is a matrix product in float32, which adds them in the order
of their slots; a masked key adds an exact zero, so the gaps between a node's ancestors change
nothing. On a CPU, oneDNN's products treat every row alike whatever their number, and elementwise
operations do so anyway: there the whole pass has this property (`sgl-eagle validate` counts it).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ATTENTION_BACKEND = "ordered float32"
"""What cost tables and reports call this attention."""

_QUERIES_AT_ONCE = 512  # bounds the scores of a long pass
_KEYS_AT_ONCE = 256  # of a longer sum, libraries choose blocks by its length


def with_ones(values: Tensor) -> Tensor:
    """Values as their weighted sums need them.

    Args:
        values: [..., D] in any type.

    Returns:
        [..., D + 1] float32, the last column ones: its sum is the denominator of the softmax, added
        up in the same order as the rest; `divide_sums` divides by it.
    """
    return functional.pad(values.float(), (0, 1), value=1.0)


def slots_with_ones(*shape: int, head_dim: int, device: torch.device | str) -> Tensor:
    """Room for values, to be stored one after the other by `store_values`.

    Args:
        *shape: Sizes before the last.
        head_dim: D.
        device: Where.

    Returns:
        [*shape, D + 1] float32, all of it ones.
    """
    return torch.ones((*shape, head_dim + 1), device=device)


def store_values(slots: Tensor, values: Tensor) -> None:
    """Fill slots, their column of ones apart.

    Args:
        slots: [..., D + 1], part of `slots_with_ones`; changed.
        values: [..., D] in any type.
    """
    slots[..., :-1] = values


def divide_sums(weighted: Tensor) -> Tensor:
    """Weighted means of weighted sums.

    Args:
        weighted: [..., D + 1], from `weigh_in_order`, or several of them added up.

    Returns:
        [..., D].
    """
    return weighted[..., :-1] / weighted[..., -1:]


def attend_in_order(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """Scaled dot-product attention in float32.

    Args:
        queries: [R, Q, D] in any type.
        keys: [R, L, D] float32.
        values: [R, L, D + 1] float32, `with_ones`.
        bias: [Q, L] float32, 0 for keys that a query sees and -inf for the others; None shows all.
            Every query sees at least one key.

    Returns:
        [R, Q, D] in the type of `queries`.
    """
    scaled = queries.float() * queries.shape[-1] ** -0.5
    if bias is None:
        return _attend(scaled, keys, values, None).to(queries.dtype)
    parts = [
        _attend(some, keys, values, rows)
        for some, rows in zip(
            scaled.split(_QUERIES_AT_ONCE, dim=1), bias.split(_QUERIES_AT_ONCE), strict=True
        )
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(queries.dtype)


def weigh_in_order(weights: Tensor, values: Tensor) -> Tensor:
    """Weighted sums of values, added up in the order of their slots.

    Args:
        weights: [R, Q, L] float32.
        values: [R, L, N] float32.

    Returns:
        [R, Q, N].
    """
    weighted = torch.bmm(weights[..., :_KEYS_AT_ONCE], values[:, :_KEYS_AT_ONCE])
    for start in range(_KEYS_AT_ONCE, values.shape[1], _KEYS_AT_ONCE):
        block = slice(start, start + _KEYS_AT_ONCE)
        weighted = torch.baddbmm(weighted, weights[..., block], values[:, block])
    return weighted


def _attend(scaled: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    transposed = keys.transpose(1, 2)
    if bias is None:
        scores = torch.bmm(scaled, transposed)
    else:
        scores = torch.baddbmm(bias, scaled, transposed)
    weights = scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    return divide_sums(weigh_in_order(weights, values))
