"""The two-stage head in plain torch: what the kernels and `cpu` must reproduce.

Low-rank scores are products in the dtype of the weights; exact logits and all else are float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sgl_eagle_kernels.lm_head.head import GlobalTop, HeadTopk, LocalTop, TwoStageHead
from sgl_eagle_kernels.lm_head.order import key_ids, key_scores, rank_keys


class Candidates(NamedTuple):
    """What stage 1 hands to stage 2.

    Attributes:
        ids: [N, C] int64 token ids; -1 is padding.
        dropped_log_mass: [N] float32 log-sum-exp of the low-rank scores of all other tokens.
        scores: [N, C] float32 low-rank scores of the candidates, minus infinity for padding; None
            takes the dropped mass as it is.
    """

    ids: Tensor
    dropped_log_mass: Tensor
    scores: Tensor | None = None


def choose_candidates(head_input: Tensor, head: TwoStageHead) -> Candidates:
    """Stage 1.

    Args:
        head_input: [N, H].
        head: Weights.

    Returns:
        C candidates of each row.
    """
    # A copy of our own: candidates are struck out of it.
    scores = score_vocabulary(head_input, head).to(torch.float32, copy=True)
    return take_candidates(scores, head)


def take_candidates(scores: Tensor, head: TwoStageHead) -> Candidates:
    """The shortlist of some low-rank scores.

    Args:
        scores: [N, V] float32 in the order of `head.up`, overwritten.
        head: How candidates are chosen.

    Returns:
        C candidates of each row.
    """
    if isinstance(head.shortlist, GlobalTop):
        return _take_global(scores, head.num_candidates)
    return _take_local(scores, head, head.shortlist)


def score_vocabulary(head_input: Tensor, head: TwoStageHead) -> Tensor:
    """Low-rank scores of all tokens.

    Args:
        head_input: [N, H].
        head: Weights.

    Returns:
        [N, V] in the order of `head.up`; float32 where that is int8.
    """
    low_rank = functional.linear(head_input, head.down)
    if head.up_scale is None:
        return functional.linear(low_rank, head.up)
    return functional.linear(low_rank.float(), head.up.float()) * head.up_scale


def _take_global(scores: Tensor, count: int) -> Candidates:
    keys = rank_keys(scores, torch.arange(scores.shape[1], device=scores.device))
    best = keys.topk(count, dim=-1).values
    ids = key_ids(best)
    scores.scatter_(1, ids, -torch.inf)
    return _settle(ids, key_scores(best), _log_mass(scores))


def _take_local(scores: Tensor, head: TwoStageHead, shortlist: LocalTop) -> Candidates:
    num_rows, num_tokens = scores.shape
    padding = -num_tokens % shortlist.tile_size
    if padding:
        scores = functional.pad(scores, (0, padding), value=-torch.inf)
    tiles = scores.view(num_rows, -1, shortlist.tile_size)
    values, places = [], []
    for _ in range(shortlist.per_tile):
        # Of equal values max takes the first, which is the lowest id of the tile.
        best = tiles.max(dim=-1, keepdim=True)
        values.append(best.values)
        places.append(best.indices)
        tiles.scatter_(2, best.indices, -torch.inf)
    starts = torch.arange(0, scores.shape[1], shortlist.tile_size, device=scores.device)
    chosen = (torch.cat(places, dim=-1) + starts[:, None]).flatten(1).clamp(max=num_tokens - 1)
    ids = chosen if head.ids is None else head.ids[chosen]
    return _settle(ids, torch.cat(values, dim=-1).flatten(1), _log_mass(scores))


def _log_mass(scores: Tensor) -> Tensor:
    # log_softmax is one fused pass on a CPU, where logsumexp is four, and slow at underflow.
    best = scores.amax(dim=-1)
    below = torch.log_softmax(scores, dim=-1).amax(dim=-1)
    return (best - below).where(best > -torch.inf, best)


def _settle(ids: Tensor, values: Tensor, dropped_log_mass: Tensor) -> Candidates:
    # A score of minus infinity is padding, or a token that was struck out and found again. Scores
    # that are not numbers were struck out too, and have to reach the flag.
    broken = (values.isnan() | values.isposinf()).any(dim=-1)
    return Candidates(
        ids.masked_fill(values.isneginf(), -1),
        dropped_log_mass.masked_fill(broken, torch.nan),
        values,
    )


def rank_candidates(
    head_input: Tensor, head: TwoStageHead, candidates: Candidates, topk: int
) -> HeadTopk:
    """Stage 2: exact logits of the candidates, normalised over the whole vocabulary.

    Args:
        head_input: [N, H].
        head: Weights.
        candidates: From stage 1.
        topk: K.

    Returns:
        The best K candidates.
    """
    num_rows, count = candidates.ids.shape
    valid = candidates.ids >= 0
    ids = candidates.ids.clamp(min=0)
    rows = head.weight.index_select(0, ids.flatten()).view(num_rows, count, -1)
    # In half precision a logit would be off by more than what the shortlist loses.
    logits = torch.bmm(rows.float(), head_input.float()[:, :, None])[:, :, 0]
    logits = logits.masked_fill(~valid, -torch.inf)
    dropped = candidates.dropped_log_mass
    if candidates.scores is not None:
        dropped = dropped + missing_log_mass(logits, candidates.scores)
    log_normalizer = torch.logaddexp(logits.logsumexp(-1), dropped)
    return take_topk(rank_keys(logits, ids), log_normalizer, topk)


def missing_log_mass(logits: Tensor, scores: Tensor) -> Tensor:
    """What low-rank scores miss of the log mass of the tokens that a shortlist drops.

    A score leaves out a part of its logit. Parts left out are up as often as down, but a sum of
    exponentials gains more by the one than it loses by the other: of normally distributed parts,
    the log of the mean exponential is their mean and half their variance. Candidates are chosen by
    scores, so their own parts are a fair sample.

    Args:
        logits: [N, C] float32 exact logits of the candidates.
        scores: [N, C] float32 low-rank scores; minus infinity in either is left out.

    Returns:
        [N] float32 nats, 0 where nothing is known.
    """
    known = (logits > -torch.inf) & (scores > -torch.inf)
    count = known.sum(dim=-1, keepdim=True).clamp(min=1)
    residual = torch.where(known, logits - scores, 0.0)
    mean = residual.sum(dim=-1, keepdim=True) / count
    variance = torch.where(known, residual - mean, 0.0).square().sum(dim=-1) / count[:, 0]
    return mean[:, 0] + 0.5 * variance


def take_topk(keys: Tensor, log_normalizer: Tensor, topk: int) -> HeadTopk:
    """The best of some keyed logits.

    Args:
        keys: [N, C] int64 from `rank_keys`.
        log_normalizer: [N] float32; a row where it is not finite is flagged.
        topk: K, at most C.

    Returns:
        The best K of each row.
    """
    best = keys.topk(topk, dim=-1).values
    finite = log_normalizer.isfinite()
    log_probs = key_scores(best) - log_normalizer[:, None]
    lowest = torch.arange(topk, device=keys.device)
    return HeadTopk(
        log_probs=log_probs.where(finite[:, None], -torch.inf),
        ids=key_ids(best).where(finite[:, None], lowest),
        log_normalizer=log_normalizer,
        is_finite=finite,
    )


@torch.inference_mode()
def two_stage_topk(head_input: Tensor, head: TwoStageHead, topk: int) -> HeadTopk:
    """Both stages.

    Args:
        head_input: [N, H] in the dtype of the weights.
        head: Weights.
        topk: K.

    Returns:
        The best K tokens of each row.
    """
    candidates = choose_candidates(head_input, head)
    return rank_candidates(head_input, head, candidates, topk)


@torch.inference_mode()
def full_topk(head_input: Tensor, weight: Tensor, topk: int) -> HeadTopk:
    """The full head by the same rules of ties and of rows that are not finite.

    Args:
        head_input: [N, H] in the dtype of the weights.
        weight: [V, H].
        topk: K.

    Returns:
        The best K tokens of each row.
    """
    logits = functional.linear(head_input, weight).float()
    keys = rank_keys(logits, torch.arange(weight.shape[0], device=weight.device))
    return take_topk(keys, _log_mass(logits), topk)


@torch.inference_mode()
def low_rank_topk(head_input: Tensor, head: TwoStageHead, topk: int) -> HeadTopk:
    """The low-rank head used directly, without a second stage: a route to compare with.

    Args:
        head_input: [N, H] in the dtype of the weights.
        head: Weights; `weight` is not read.
        topk: K.

    Returns:
        The best K tokens of each row, by the low-rank scores.
    """
    scores = score_vocabulary(head_input, head).float()
    ids = torch.arange(head.num_tokens, device=scores.device) if head.ids is None else head.ids
    return take_topk(rank_keys(scores, ids), _log_mass(scores), topk)
