"""The two-stage head on a CPU: the results of `reference`, in fewer and cheaper operations.

With one or a few rows an operation on a tensor costs more than its arithmetic, so shortlists are
found and ranked in NumPy, all rows at once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from sgl_eagle_kernels.lm_head.head import HeadTopk, LocalTop, TwoStageHead
from sgl_eagle_kernels.lm_head.reference import (
    missing_log_mass,
    rank_candidates,
    score_vocabulary,
    take_candidates,
)
from sgl_eagle_kernels.packed_linear import Int8Weight, int8_product, packed_linear

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

MOST_PER_TILE = 4
"""Candidates of a tile that are taken out one by one."""

_LEAST_EXPONENT = -80.0  # beside the best score, a vocabulary of such numbers adds nothing
_LOW_32 = 0xFFFFFFFF


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
    # A copy of our own: candidates are struck out of it.
    scores = _score_vocabulary(head_input, head).float()
    shortlist = head.shortlist
    if isinstance(shortlist, LocalTop) and shortlist.per_tile <= MOST_PER_TILE:
        return _rank_tile_winners(head_input, head, scores, shortlist, topk)
    return rank_candidates(head_input, head, take_candidates(scores, head), topk)


def _score_vocabulary(head_input: Tensor, head: TwoStageHead) -> Tensor:
    if head.up_scale is not None and head.packed_up is None:
        return score_vocabulary(head_input, head)
    low_rank = packed_linear(head_input, head.down, head.packed_down)
    if isinstance(head.packed_up, Int8Weight):
        return int8_product(low_rank, head.packed_up)
    return packed_linear(low_rank, head.up, head.packed_up)


def _rank_tile_winners(
    head_input: Tensor, head: TwoStageHead, scores: Tensor, shortlist: LocalTop, topk: int
) -> HeadTopk:
    num_tokens = scores.shape[1]
    padding = -num_tokens % shortlist.tile_size
    if padding:
        scores = functional.pad(scores, (0, padding), value=-torch.inf)
    values, chosen = _take_best(scores.numpy(), shortlist)
    places = torch.from_numpy(chosen.clip(max=num_tokens - 1))
    ids = places if head.ids is None else head.ids[places]
    # Where the low-rank head gives a token no chance, it is padding.
    logits = np.where(values == -np.inf, values, _exact_logits(head_input, head.weight, ids))
    dropped = _log_mass(scores).numpy()
    with np.errstate(invalid="ignore"):
        # A score that is not a number, or plus infinity, has to reach the flag.
        dropped = np.where((values < np.inf).all(axis=1), dropped, np.nan)
        best = logits.max(axis=1)
        exact = best + np.log(np.exp(logits - best[:, None]).sum(axis=1))
        dropped += missing_log_mass(torch.from_numpy(logits), torch.from_numpy(values)).numpy()
        normalizers = np.logaddexp(exact, dropped)
    log_probs, tokens = _take_topk(logits, ids.numpy(), topk)
    finite = np.isfinite(normalizers)
    with np.errstate(invalid="ignore"):
        log_probs = np.where(finite[:, None], log_probs - normalizers[:, None], -np.inf)
    return HeadTopk(
        log_probs=torch.from_numpy(log_probs.astype(np.float32)),
        ids=torch.from_numpy(np.where(finite[:, None], tokens, np.arange(topk))),
        log_normalizer=torch.from_numpy(normalizers),
        is_finite=torch.from_numpy(finite),
    )


def _take_best(scores: FloatArray, shortlist: LocalTop) -> tuple[FloatArray, IntArray]:
    # The best of every tile, [N, C] scores and places in the vocabulary; they are struck out.
    tiles = scores.reshape(len(scores), -1, shortlist.tile_size)
    starts = np.arange(0, scores.shape[1], shortlist.tile_size)[:, None]
    values, places = [], []
    for _ in range(shortlist.per_tile):
        # Of equal values argmax takes the first, which is the lowest id of the tile.
        place = tiles.argmax(axis=-1)[..., None]
        values.append(np.take_along_axis(tiles, place, axis=-1))
        places.append(place + starts)
        np.put_along_axis(tiles, place, -np.inf, axis=-1)
    return (
        np.concatenate(values, axis=-1).reshape(len(scores), -1),
        np.concatenate(places, axis=-1).reshape(len(scores), -1),
    )


def _log_mass(scores: Tensor) -> Tensor:
    # [N] log-sum-exp of scores, which are overwritten. Numbers that exp would let underflow are
    # raised: it takes thirty times as long for them.
    best = scores.amax(dim=-1, keepdim=True)
    total = scores.sub_(best).clamp_(min=_LEAST_EXPONENT).exp_().sum(dim=-1)
    best = best[:, 0]
    return (best + total.log()).where(best > -torch.inf, best)


def _exact_logits(head_input: Tensor, weight: Tensor, ids: Tensor) -> FloatArray:
    # [N, C]. Row by row, so that the gathered rows of the head stay in the cache.
    logits = torch.empty(ids.shape, dtype=torch.float32)
    for row, inputs in enumerate(head_input.float()):
        torch.mv(weight.index_select(0, ids[row]).float(), inputs, out=logits[row])
    found: FloatArray = logits.numpy()
    return found


def _take_topk(logits: FloatArray, ids: IntArray, topk: int) -> tuple[FloatArray, IntArray]:
    # The best K logits of each row and their tokens, by the keys of `order`, which are sorted:
    # a row of integers takes a few microseconds.
    bits = (logits + np.float32(0.0)).view(np.int32)
    keys = (_flip_negative(bits).astype(np.int64) << 32) | (_LOW_32 - ids)
    keys.sort(axis=1)
    best = keys[:, : -topk - 1 : -1]
    scores = _flip_negative((best >> 32).astype(np.int32)).view(np.float32)
    return scores, _LOW_32 - (best & _LOW_32)


def _flip_negative(bits: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    # Bit patterns of negative floats fall as the floats rise.
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
