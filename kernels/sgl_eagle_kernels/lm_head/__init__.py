"""The two-stage LM head: the full vocabulary at a fraction of its cost."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_eagle_kernels.lm_head import cpu, reference
from sgl_eagle_kernels.lm_head.head import (
    MAX_TOPK,
    GlobalTop,
    HeadTopk,
    LocalTop,
    Shortlist,
    TwoStageHead,
    build_two_stage_head,
)
from sgl_eagle_kernels.lm_head.order import rank_keys
from sgl_eagle_kernels.lm_head.shuffle import expected_recall, shuffle_vocabulary

__all__ = [
    "GlobalTop",
    "HeadTopk",
    "LocalTop",
    "Shortlist",
    "TwoStageHead",
    "build_two_stage_head",
    "expected_recall",
    "merge_shards",
    "rank_full",
    "rank_tokens",
    "shuffle_vocabulary",
]


def rank_tokens(head_input: Tensor, head: TwoStageHead, topk: int) -> HeadTopk:
    """The most probable tokens of every row, by the two-stage head.

    Runs the Triton kernels on CUDA and plain torch elsewhere. On CUDA it neither synchronises with
    the host nor depends on values, so it can be captured in a graph.

    Args:
        head_input: [N, H] in the dtype of the weights.
        head: Weights.
        topk: K, at most `head.most_topk`.

    Returns:
        Ids and log-probabilities that are normalised over the whole vocabulary.

    Raises:
        ValueError: If the input does not fit the weights, or `topk` is out of range.
    """
    _check_input(head_input, head.weight)
    if not 1 <= topk <= head.most_topk:
        raise ValueError(
            f"topk must be in [1, {head.most_topk}] for {head.shortlist} of {head.num_tokens} "
            f"tokens, got {topk}"
        )
    if head_input.is_cuda:
        # Imported late: only CUDA machines need Triton.
        from sgl_eagle_kernels.lm_head._triton import two_stage_topk

        return two_stage_topk(head_input.contiguous(), head, topk)
    return cpu.two_stage_topk(head_input, head, topk)


def rank_full(head_input: Tensor, weight: Tensor, topk: int) -> HeadTopk:
    """The most probable tokens of every row, by the full head and under the same rules.

    Runs Triton kernels after the matrix product on CUDA and plain torch elsewhere; on CUDA it can
    be captured in a graph.

    Args:
        head_input: [N, H] in the dtype of the weights.
        weight: [V, H] full head, contiguous along H.
        topk: K, at most `MAX_TOPK` and V.

    Returns:
        Ids and log-probabilities.

    Raises:
        ValueError: If the input does not fit the weights, or `topk` is out of range.
    """
    _check_input(head_input, weight)
    if not 1 <= topk <= min(MAX_TOPK, weight.shape[0]):
        raise ValueError(
            f"topk must be in [1, {min(MAX_TOPK, weight.shape[0])}] for the full head of "
            f"{weight.shape[0]} tokens, got {topk}"
        )
    if head_input.is_cuda:
        from sgl_eagle_kernels.lm_head._triton.full import full_topk

        return full_topk(head_input, weight, topk)
    return reference.full_topk(head_input, weight, topk)


def _check_input(head_input: Tensor, weight: Tensor) -> None:
    if head_input.dim() != 2 or head_input.shape[1] != weight.shape[1]:  # noqa: PLR2004
        raise ValueError(f"head_input must be [N, {weight.shape[1]}], got {list(head_input.shape)}")
    if head_input.dtype != weight.dtype or head_input.device != weight.device:
        raise ValueError(
            f"head_input must be {weight.dtype} on {weight.device}, got "
            f"{head_input.dtype} on {head_input.device}"
        )


def merge_shards(shards: Sequence[HeadTopk], offsets: Sequence[int]) -> HeadTopk:
    """Join what tensor-parallel ranks found in their parts of the vocabulary.

    Args:
        shards: One result for each part, each [N, K], all with the same K.
        offsets: Id of the first token of each part.

    Returns:
        The best K of all, normalised over all parts; a row is finite if it is in every part.
    """
    topk = shards[0].ids.shape[1]
    log_normalizer = torch.stack([shard.log_normalizer for shard in shards]).logsumexp(0)
    logits = [shard.log_probs + shard.log_normalizer[:, None] for shard in shards]
    ids = [shard.ids + offset for shard, offset in zip(shards, offsets, strict=True)]
    return reference.take_topk(
        rank_keys(torch.cat(logits, 1), torch.cat(ids, 1)), log_normalizer, topk
    )
