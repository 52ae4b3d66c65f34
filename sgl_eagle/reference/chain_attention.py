"""Attention of draft nodes over the committed text and over their own ancestors.

Letters: P roots (positions drafted from), W queries of a root, L prefix entries, C chain entries of
a query, Hq and Hkv query and key-value heads, G = Hq / Hkv, D head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sgl_eagle.reference.ordered_attention import divide_sums, weigh_in_order


def attend_prefix_and_chain(
    q: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    prefix_visible: Tensor | None,
    chain_k: Tensor,
    chain_v: Tensor,
) -> Tensor:
    """One softmax over the prefix shared by all roots and each query's own chain, in float32.

    What a node reads does not depend on how many roots and nodes are drafted with it, nor on prefix
    entries that it does not see (`weigh_in_order`). Every query must see at least one entry.

    Args:
        q: [P, W, Hq, D], rotary embedding applied.
        prefix_k: [L, Hkv, D] float32, rotary embedding applied.
        prefix_v: [L, Hkv, D + 1] float32, `with_ones`.
        prefix_visible: [P, L] bool, which prefix entries the queries of a root see; None for all.
        chain_k: [P, W, C, Hkv, D] float32, keys of a query's drafted ancestors and of itself.
        chain_v: [P, W, C, Hkv, D + 1] float32, `with_ones`.

    Returns:
        [P, W, Hq, D] in the dtype of `q`.
    """
    num_roots, width, num_heads, head_dim = q.shape
    length, num_kv_heads, _ = prefix_k.shape
    group = num_heads // num_kv_heads
    grouped = q.float().view(num_roots, width, num_kv_heads, group, head_dim) * head_dim**-0.5

    # The prefix is shared, so all queries of one key-value head form a single matrix product.
    rows = grouped.permute(2, 0, 1, 3, 4).reshape(num_kv_heads, -1, head_dim)
    scores = torch.bmm(rows, prefix_k.permute(1, 2, 0))
    scores = scores.view(num_kv_heads, num_roots, width, group, length)
    if prefix_visible is not None:
        scores.masked_fill_(~prefix_visible[None, :, None, None, :], -math.inf)
    # Not a product of matrices: these small ones would be added up by their number.
    own = (grouped[:, :, :, :, None] * chain_k.permute(0, 1, 3, 2, 4)[:, :, :, None]).sum(dim=-1)
    own = own.permute(2, 0, 1, 3, 4)  # [Hkv, P, W, G, C]
    highest = scores.amax(dim=-1, keepdim=True)
    if own.shape[-1]:
        highest = highest.maximum(own.amax(dim=-1, keepdim=True))

    weights = scores.sub_(highest).exp_().view(num_kv_heads, -1, length)
    of_prefix = weigh_in_order(weights, prefix_v.transpose(0, 1))
    of_prefix = of_prefix.view(num_kv_heads, num_roots, width, group, head_dim + 1)
    of_chain = (own - highest).exp().permute(1, 2, 0, 3, 4) @ chain_v.transpose(2, 3)
    attended = divide_sums(of_prefix.permute(1, 2, 0, 3, 4) + of_chain)
    return attended.reshape(num_roots, width, num_heads, head_dim).to(q.dtype)


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
