"""What the kernel must do, in torch's own operations."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_round_reference(
    tokens: Tensor,
    features: Tensor,
    *,
    rows: Tensor,
    positions: Tensor,
    kept_tokens: Tensor,
    kept_features: Tensor,
) -> None:
    """Keep one token of each request, and its features.

    Args:
        tokens: [B] integers.
        features: [B, F].
        rows: [B] int64, distinct.
        positions: [B] int64, not negative.
        kept_tokens: [P, W] int64; B places are written.
        kept_features: [P, W, F]; likewise.
    """
    places = positions % kept_tokens.shape[1]
    kept_tokens[rows, places] = tokens.to(torch.int64)
    kept_features[rows, places] = features
