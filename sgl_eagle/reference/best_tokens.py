"""The best continuations of a row of draft logits, with ties broken the same way everywhere."""

from __future__ import annotations

import torch
from torch import Tensor

TIE_MARGIN = 8
"""Extra candidates looked at beyond `topk`, so that a tie at the cut falls to the lowest id too."""


@torch.inference_mode()
def best_tokens(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Most probable tokens of every row, ties to the lowest id.

    In bf16 neighbouring logits tie often; without one rule for ties, a draft recorded in a large
    batch and one drafted live would name different children.

    Args:
        logits: [..., V] of any float type.
        topk: How many.

    Returns:
        Natural-log probabilities [..., topk] float32, descending, and ids [..., topk] int64.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    values, ids = log_probs.topk(min(topk + TIE_MARGIN, logits.shape[-1]), dim=-1)
    by_id = ids.argsort(dim=-1)
    values, ids = values.gather(-1, by_id), ids.gather(-1, by_id)
    by_value = values.argsort(dim=-1, descending=True, stable=True)[..., :topk]
    return values.gather(-1, by_value), ids.gather(-1, by_value)
