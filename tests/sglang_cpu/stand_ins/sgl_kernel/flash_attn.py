"""Plain torch in place of FlashAttention-3 over a cache with pages of one token.

Only what SGLang's backend asks for with the tests' models; a call that a kernel would answer with
nonsense, such as more queries of a request than it was told, is an error here.
"""

from itertools import pairwise

import torch


def flash_attn_with_kvcache(
    *,
    q,
    k_cache,
    v_cache,
    page_table,
    cache_seqlens,
    cu_seqlens_q,
    max_seqlen_q,
    softmax_scale,
    causal,
    window_size,
    softcap,
    return_softmax_lse=False,
    **_of_no_effect,
):
    if window_size != (-1, -1) or softcap or k_cache.shape[1] != 1:
        raise NotImplementedError("stand-in attention has no window, cap or larger pages")
    bounds = cu_seqlens_q.tolist()
    if len(bounds) != len(page_table) + 1 or len(page_table) != len(cache_seqlens):
        raise ValueError(f"{len(bounds) - 1} spans of queries, {page_table.shape=}")
    if bounds[-1] != len(q):
        raise ValueError(f"spans end at query {bounds[-1]} of {len(q)}")
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[1], len(q))
    group = q.shape[1] // k_cache.shape[2]
    spans = zip(pairwise(bounds), page_table, cache_seqlens.tolist(), strict=True)
    for (first, last), pages, length in spans:
        count = last - first
        if count > max_seqlen_q or length > len(pages):
            raise ValueError(f"{count=}, {max_seqlen_q=}, {length=}, {len(pages)=}")
        read = pages[:length].long()
        keys, values = (
            cache[read, 0].float().repeat_interleave(group, 1) for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), keys) * softmax_scale
        if causal:
            visible = torch.ones((count, length), dtype=torch.bool).tril(length - count)
            scores = scores.masked_fill(~visible, -torch.inf)
        out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
        lse[:, first:last] = scores.logsumexp(-1)
    return (out, lse) if return_softmax_lse else out


def flash_attn_varlen_func(**_arguments):
    raise NotImplementedError("stand-in attention reads the cache")


def get_scheduler_metadata(**_arguments):
    """None, which lets each layer schedule for itself."""
