"""Attention of draft nodes over the committed text and over their own ancestors.

Letters: P roots (positions drafted from), W queries of a root, L prefix entries, C chain entries of
a query, Hq and Hkv query and key-value heads, G = Hq / Hkv, D head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend_prefix_and_chain(
    q: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    prefix_visible: Tensor | None,
    chain_k: Tensor,
    chain_v: Tensor,
    chain_visible: Tensor | None,
) -> Tensor:
    """One softmax over the prefix shared by all roots and each query's own chain.

    Every query must see at least one entry. The softmax is taken in float32.

    Args:
        q: [P, W, Hq, D], rotary embedding applied.
        prefix_k: [L, Hkv, D], rotary embedding applied.
        prefix_v: [L, Hkv, D].
        prefix_visible: [P, L] bool, which prefix entries the queries of a root see; None for all.
        chain_k: [P, W, C, Hkv, D], keys of a query's drafted ancestors and of itself.
        chain_v: [P, W, C, Hkv, D].
        chain_visible: [P, W, C] bool, False is padding; None for all.

    Returns:
        [P, W, Hq, D] in the dtype of `q`.
    """
    num_roots, width, num_heads, head_dim = q.shape
    length, num_kv_heads, _ = prefix_k.shape
    group = num_heads // num_kv_heads
    grouped = q.view(num_roots, width, num_kv_heads, group, head_dim) * (1 / math.sqrt(head_dim))

    # The prefix is shared, so all queries of one key-value head form a single matrix product.
    rows = grouped.permute(2, 0, 1, 3, 4).reshape(num_kv_heads, -1, head_dim)
    prefix_scores = (rows @ prefix_k.permute(1, 2, 0)).view(
        num_kv_heads, num_roots, width, group, length
    )
    if prefix_visible is not None:
        prefix_scores = prefix_scores.masked_fill(
            ~prefix_visible[None, :, None, None, :], -math.inf
        )
    own = grouped @ chain_k.permute(0, 1, 3, 4, 2)  # [P, W, Hkv, G, C]
    if chain_visible is not None:
        own = own.masked_fill(~chain_visible[:, :, None, None, :], -math.inf)
    scores = torch.cat([prefix_scores, own.permute(2, 0, 1, 3, 4)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)

    of_prefix, of_chain = weights[..., :length], weights[..., length:]
    shared = of_prefix.reshape(num_kv_heads, -1, length) @ prefix_v.transpose(0, 1)
    shared = shared.view(num_kv_heads, num_roots, width, group, head_dim).permute(1, 2, 0, 3, 4)
    own_part: Tensor = of_chain.permute(1, 2, 0, 3, 4) @ chain_v.transpose(2, 3)
    return (shared + own_part).reshape(num_roots, width, num_heads, head_dim)


def attend_rows_and_chain(
    q: Tensor, prefix_k: Tensor, prefix_v: Tensor, chain_k: list[Tensor], chain_v: list[Tensor]
) -> Tensor:
    """The same attention along whole rows of text, as training-time test needs it.

    The query at index i sees the prefix entries j <= i of its row and entry i of each chain tensor.

    Args:
        q: [B, T, Hq, D], rotary embedding applied.
        prefix_k: [B, T, Hkv, D], rotary embedding applied.
        prefix_v: [B, T, Hkv, D].
        chain_k: One [B, T, Hkv, D] tensor for each later draft step so far.
        chain_v: Likewise.

    Returns:
        [B, T, Hq, D] in the dtype of `q`.
    """
    num_rows, length, num_heads, head_dim = q.shape
    num_kv_heads = prefix_k.shape[2]
    shape = (num_rows, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    grouped = (q * (1 / math.sqrt(head_dim))).view(shape)
    by_head = grouped.permute(0, 2, 3, 1, 4)  # [B, Hkv, G, T, D]
    scores = by_head @ prefix_k.permute(0, 2, 3, 1)[:, :, None]  # [B, Hkv, G, T, T]
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(future, -math.inf)
    own = [(grouped * k[:, :, :, None]).sum(-1).permute(0, 2, 3, 1) for k in chain_k]
    if own:
        scores = torch.cat([scores, torch.stack(own, dim=-1).to(scores.dtype)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    out = (weights[..., :length] @ prefix_v.permute(0, 2, 1, 3)[:, :, None]).permute(0, 3, 1, 2, 4)
    for step, v in enumerate(chain_v):
        share = weights[..., length + step].permute(0, 3, 1, 2)
        out = out + share[..., None] * v[:, :, :, None]
    return out.reshape(num_rows, length, num_heads, head_dim)
