"""Triton kernel that keeps a round: several programs a request, each a part of its features."""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MOST_FEATURES = 2048
"""Of a program: 16 bytes a thread of bfloat16."""


@triton.jit
def keep_round_kernel(
    tokens_ptr,
    features_ptr,
    rows_ptr,
    positions_ptr,
    kept_tokens_ptr,
    kept_features_ptr,
    stride_features_request,
    WINDOW: tl.constexpr,
    NUM_FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One part of the features of one request; the first part's program keeps the token."""
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = tl.load(rows_ptr + request).to(tl.int64)
    place = row * WINDOW + tl.load(positions_ptr + request) % WINDOW
    lane = part * BLOCK + tl.arange(0, BLOCK)
    inside = lane < NUM_FEATURES
    values = tl.load(features_ptr + request * stride_features_request + lane, mask=inside)
    tl.store(kept_features_ptr + place * NUM_FEATURES + lane, values, mask=inside)
    if part == 0:
        tl.store(kept_tokens_ptr + place, tl.load(tokens_ptr + request).to(tl.int64))


def keep_round(
    tokens: Tensor,
    features: Tensor,
    rows: Tensor,
    positions: Tensor,
    kept_tokens: Tensor,
    kept_features: Tensor,
) -> None:
    """Launch.

    Args:
        tokens: [B] integers.
        features: [B, F], each row contiguous.
        rows: [B] int64, distinct.
        positions: [B] int64, not negative.
        kept_tokens: [P, W] int64, contiguous; B places are written.
        kept_features: [P, W, F] of the features' dtype, contiguous; likewise.
    """
    num_requests, num_features = features.shape
    block = min(MOST_FEATURES, triton.next_power_of_2(num_features))
    keep_round_kernel[num_requests, triton.cdiv(num_features, block)](
        tokens,
        features,
        rows,
        positions,
        kept_tokens,
        kept_features,
        features.stride(0),
        WINDOW=kept_tokens.shape[1],
        NUM_FEATURES=num_features,
        BLOCK=block,
        num_warps=8,
    )
