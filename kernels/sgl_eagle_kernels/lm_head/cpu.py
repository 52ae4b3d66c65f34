"""The two-stage head on a CPU: the results of `reference`, in fewer and cheaper operations.

With one or a few rows an operation on a tensor costs more than its arithmetic, so the shortlist of
every row is ranked in NumPy.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from sgl_eagle_kernels.lm_head.head import HeadTopk, LocalTop, TwoStageHead
from sgl_eagle_kernels.lm_head.reference import (
    rank_candidates,
    score_vocabulary,
    take_candidates,
)
from sgl_eagle_kernels.packed_linear import packed_linear

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@torch.inference_mode()
def two_stage_topk(head_input: Tensor, head: TwoStageHead, topk: int) -> HeadTopk:
    """Both stages.

    Args:
        head_input: [N, H] on a CPU, in the dtype of the weights.
        head: Weights.
        topk: K.

    Returns:
        The best K tokens of each row.
    """
    # A copy of our own: `take_candidates` strikes candidates out of it.
    scores = _score_vocabulary(head_input, head).to(torch.float32, copy=True)
    if isinstance(head.shortlist, LocalTop) and head.shortlist.per_tile == 1:
        return _rank_tile_winners(head_input, head, scores, head.shortlist.tile_size, topk)
    return rank_candidates(head_input, head, take_candidates(scores, head), topk)


def _score_vocabulary(head_input: Tensor, head: TwoStageHead) -> Tensor:
    if head.up_scale is not None and head.packed_up is None:
        return score_vocabulary(head_input, head)
    low_rank = packed_linear(head_input, head.down, head.packed_down)
    return packed_linear(low_rank, head.up, head.packed_up)


def _rank_tile_winners(
    head_input: Tensor, head: TwoStageHead, scores: Tensor, tile_size: int, topk: int
) -> HeadTopk:
    num_rows, num_tokens = scores.shape
    # One fused pass, where logsumexp is four.
    below = torch.log_softmax(scores, dim=-1).amax(dim=-1, keepdim=True)
    padding = -num_tokens % tile_size
    if padding:
        scores = functional.pad(scores, (0, padding), value=-torch.inf)
    # Of equal values max takes the first, which is the lowest id of the tile.
    values, places = scores.view(num_rows, -1, tile_size).max(dim=-1)
    log_mass = values.amax(dim=-1, keepdim=True) - below
    chosen = places + torch.arange(0, scores.shape[1], tile_size)
    ids = chosen if head.ids is None else head.ids[chosen]
    rows = head.weight.index_select(0, ids.flatten()).view(*ids.shape, -1)
    # With the vector first, the product of a CPU takes a third of the time.
    logits = torch.bmm(head_input[:, None, :], rows.transpose(1, 2))[:, 0].float()
    ranked = [
        _rank_row(*row, topk)
        for row in zip(
            logits.numpy(), ids.numpy(), values.numpy(), log_mass[:, 0].tolist(), strict=True
        )
    ]
    normalizers = np.array([row.log_normalizer for row in ranked], np.float32)
    return HeadTopk(
        log_probs=torch.from_numpy(np.array([row.log_probs for row in ranked], np.float32)),
        ids=torch.from_numpy(np.array([row.ids for row in ranked], np.int64)),
        log_normalizer=torch.from_numpy(normalizers),
        is_finite=torch.from_numpy(np.isfinite(normalizers)),
    )


class _RankedRow(NamedTuple):
    log_probs: FloatArray
    ids: IntArray
    log_normalizer: float


def _rank_row(
    logits: FloatArray, ids: IntArray, values: FloatArray, log_mass: float, topk: int
) -> _RankedRow:
    # logits, ids, values (low-rank scores): [C]; log_mass: of all low-rank scores.
    # Where the low-rank head gives a token no chance, it is padding.
    logits = np.where(values == -np.inf, np.float32(-np.inf), logits)
    best = float(logits.max())
    if not (math.isfinite(best) and math.isfinite(log_mass)):
        return _RankedRow(np.full(topk, -np.inf, np.float32), np.arange(topk), math.nan)
    log_normalizer = best + math.log(float(np.exp(logits - best).sum()))
    dropped_share = 1.0 - float(np.exp(values - log_mass).sum())
    if dropped_share > 0:
        log_normalizer = float(np.logaddexp(log_normalizer, log_mass + math.log(dropped_share)))
    # All that tie with the last one kept take part in the order, so that the lowest ids win.
    candidates = np.flatnonzero(logits >= np.partition(logits, -topk)[-topk])
    order = candidates[np.lexsort((ids[candidates], -logits[candidates]))][:topk]
    return _RankedRow(logits[order] - log_normalizer, ids[order], log_normalizer)
