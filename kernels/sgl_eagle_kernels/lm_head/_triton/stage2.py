"""Stage 2: gathered rows of the full head, then the best K of each row."""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_eagle_kernels.launch import launch_options
from sgl_eagle_kernels.lm_head._triton.order import (
    add_log_masses,
    await_inputs,
    id_of,
    key_of,
    log_mass,
    score_of,
)
from sgl_eagle_kernels.lm_head.head import HeadTopk

BLOCK_ELEMENTS = 4096  # of weights that one program holds: 32 for each thread
MOST_HIDDEN = 4096
MOST_COMPARED = 8192  # pairs of candidates that one program compares


@triton.jit(do_not_specialize=["num_listed"])
def gather_dot_kernel(
    x_ptr,
    weight_ptr,
    ids_ptr,
    out_ptr,
    num_listed,
    stride_x_row,
    stride_weight_row,
    stride_out_row,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Products of one row's input with the rows of a matrix that are listed by id."""
    row = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    listed = lane < num_listed
    await_inputs(OVERLAP)
    ids = tl.load(ids_ptr + row * num_listed + lane, mask=listed, other=-1)
    real = ids >= 0
    # 64-bit: a large head has more than 2^31 elements.
    weight_rows = weight_ptr + tl.where(real, ids, 0).to(tl.int64) * stride_weight_row
    total = tl.zeros((BLOCK_C,), tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        w = tl.load(
            weight_rows[:, None] + h[None, :],
            mask=real[:, None] & (h < HIDDEN)[None, :],
            other=0.0,
        )
        x = tl.load(x_ptr + row * stride_x_row + h, mask=h < HIDDEN, other=0.0)
        total += tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    total = tl.where(real, total, float("-inf"))
    tl.store(out_ptr + row * stride_out_row + lane, total, mask=listed)


@triton.jit(do_not_specialize=["num_candidates", "num_masses"])
def rank_candidates_kernel(
    candidates_ptr,
    logits_ptr,
    mass_ptr,
    log_probs_ptr,
    top_ids_ptr,
    normalizer_ptr,
    finite_ptr,
    num_candidates,
    num_masses,
    TOPK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Places of some candidates of one row, with log-probabilities over the whole vocabulary.

    The place of a candidate is the number of those that come before it: all places are found at
    once, in no more time than one takes, where the best would have to be taken out one by one.
    """
    row = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, BLOCK_C)
    own = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    listed, is_own = lane < num_candidates, own < num_candidates
    at = row * num_candidates
    part = tl.arange(0, BLOCK_T)
    await_inputs(OVERLAP)
    ids = tl.load(candidates_ptr + at + lane, mask=listed, other=-1)
    logits = tl.load(logits_ptr + at + lane, mask=listed, other=float("-inf"))
    own_ids = tl.load(candidates_ptr + at + own, mask=is_own, other=-1)
    own_logits = tl.load(logits_ptr + at + own, mask=is_own, other=float("-inf"))
    mass = tl.load(mass_ptr + row * num_masses + part, mask=part < num_masses, other=float("-inf"))
    own_keys = _place_key(own_logits, own_ids, own)
    comes_before = _place_key(logits, ids, lane)[None, :] > own_keys[:, None]
    place = tl.sum(comes_before.to(tl.int32), axis=1)
    normalizer = add_log_masses(log_mass(logits, 0), log_mass(mass, 0))
    finite = (normalizer - normalizer) == 0.0
    if tl.program_id(0) == 0:
        tl.store(normalizer_ptr + row, normalizer)
        tl.store(finite_ptr + row, finite)
    kept = is_own & (place < TOPK)
    score = score_of((own_keys >> 32).to(tl.int32))
    log_prob = tl.where(finite, score - normalizer, float("-inf"))
    tl.store(log_probs_ptr + row * TOPK + place, log_prob, mask=kept)
    token = tl.where(finite, id_of(own_keys), place.to(tl.int64))
    tl.store(top_ids_ptr + row * TOPK + place, token, mask=kept)


@triton.jit
def _place_key(logits, ids, lane):
    # Padding comes after all tokens, each in a place of its own.
    padding = (tl.full(lane.shape, -0x80000000, tl.int64) << 32) | (0xFFFFFFFF - lane.to(tl.int64))
    return tl.where(ids >= 0, key_of(logits, ids), padding)


def gather_dot(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Products with listed rows of a matrix.

    Args:
        x: [N, H] contiguous.
        weight: [V, H] contiguous along H, in the dtype of `x`.
        ids: [N, C] int64 contiguous rows of `weight`, -1 for padding.

    Returns:
        [N, C] float32, minus infinity for padding.
    """
    num_rows, hidden = x.shape
    count = ids.shape[1]
    out = torch.empty(num_rows, count, dtype=torch.float32, device=x.device)
    block_h = choose_hidden_block(hidden)
    block_c = min(16, BLOCK_ELEMENTS // block_h)
    gather_dot_kernel[triton.cdiv(count, block_c), num_rows](
        x, weight, ids, out, count, x.stride(0), weight.stride(0), out.stride(0),
        HIDDEN=hidden,
        BLOCK_H=block_h,
        BLOCK_C=block_c,
        num_warps=4,
        **launch_options(x.device),
    )  # fmt: skip
    return out


def choose_hidden_block(hidden: int) -> int:
    """Part of a row of a matrix that is loaded at a time.

    Args:
        hidden: H.

    Returns:
        A power of two.
    """
    return min(MOST_HIDDEN, int(triton.next_power_of_2(hidden)))


def rank_candidates(candidates: Tensor, logits: Tensor, mass: Tensor, topk: int) -> HeadTopk:
    """The best candidates of every row.

    Args:
        candidates: [N, C] int64 contiguous ids, -1 for padding.
        logits: [N, C] float32 contiguous exact logits, minus infinity for padding.
        mass: [N, T] float32 contiguous log masses of what was dropped.
        topk: K.

    Returns:
        The best K.
    """
    num_rows, count = candidates.shape
    device = candidates.device
    result = HeadTopk(
        log_probs=torch.empty(num_rows, topk, dtype=torch.float32, device=device),
        ids=torch.empty(num_rows, topk, dtype=torch.int64, device=device),
        log_normalizer=torch.empty(num_rows, dtype=torch.float32, device=device),
        is_finite=torch.empty(num_rows, dtype=torch.bool, device=device),
    )
    block_c = triton.next_power_of_2(count)
    block_i = min(block_c, max(1, MOST_COMPARED // block_c))
    rank_candidates_kernel[triton.cdiv(count, block_i), num_rows](
        candidates, logits, mass, *result, count, mass.shape[1],
        TOPK=topk,
        BLOCK_C=block_c,
        BLOCK_T=triton.next_power_of_2(mass.shape[1]),
        BLOCK_I=block_i,
        num_warps=4,
        **launch_options(device),
    )  # fmt: skip
    return result
