"""Tokens and features of the last rounds, by request: one launch a round keeps both.

Letters: B requests; P rows of a table of requests; W places of a row; F features. A token at
position p stands at place p modulo W of its request's row.
"""

from __future__ import annotations

from torch import Tensor

from sgl_eagle_kernels.feature_ring.reference import keep_round_reference

__all__ = ["keep_round", "keep_round_reference"]


def keep_round(
    tokens: Tensor,
    features: Tensor,
    *,
    rows: Tensor,
    positions: Tensor,
    kept_tokens: Tensor,
    kept_features: Tensor,
) -> None:
    """Keep one token of each request, and its features.

    On CUDA this is one kernel. Torch's indexing takes three, 18 us of an H200 for 12,288 features
    of 128 requests (2026-11-30, a trace of SGLang 0.5.17 serving an 8B-class pair).

    Args:
        tokens: [B] integers.
        features: [B, F], each row contiguous.
        rows: [B] int64, distinct.
        positions: [B] int64, not negative.
        kept_tokens: [P, W] int64, contiguous; B places are written.
        kept_features: [P, W, F] of the features' dtype, contiguous; likewise.

    Raises:
        ValueError: If features have another size or dtype than those that are kept.
    """
    if features.shape[1:] != kept_features.shape[2:] or features.dtype != kept_features.dtype:
        raise ValueError(
            f"features must be {list(kept_features.shape[2:])} {kept_features.dtype} a request, "
            f"got {list(features.shape[1:])} {features.dtype}"
        )
    if not features.is_cuda:
        keep_round_reference(
            tokens,
            features,
            rows=rows,
            positions=positions,
            kept_tokens=kept_tokens,
            kept_features=kept_features,
        )
        return
    from sgl_eagle_kernels.feature_ring._triton import keep_round as launch

    launch(tokens, features, rows, positions, kept_tokens, kept_features)
