"""Stage 2: gathered rows of the full head, then the best K of each row, one program a row."""

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
    log_mass,
    order_of,
    score_of,
)
from sgl_eagle_kernels.lm_head.head import HeadTopk

BLOCK_ELEMENTS = 4096  # of weights that one program holds: 32 for each thread
MOST_HIDDEN = 4096


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
    HAS_IDS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Products of one row's input with some rows of a matrix, listed by id or all in order."""
    row = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    listed = lane < num_listed
    await_inputs(OVERLAP)
    if HAS_IDS:
        ids = tl.load(ids_ptr + row * num_listed + lane, mask=listed, other=-1)
        real = ids >= 0
    else:
        ids = lane
        real = listed
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
    if HAS_IDS:
        total = tl.where(real, total, float("-inf"))
    tl.store(out_ptr + row * stride_out_row + lane, total.to(out_ptr.dtype.element_ty), mask=listed)


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
    OVERLAP: tl.constexpr,
):
    """Best K of one row, with log-probabilities over the whole vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_C)
    listed = lane < num_candidates
    at = row * num_candidates + lane
    part = tl.arange(0, BLOCK_T)
    await_inputs(OVERLAP)
    mass = tl.load(mass_ptr + row * num_masses + part, mask=part < num_masses, other=float("-inf"))
    ids = tl.load(candidates_ptr + at, mask=listed, other=-1)
    logits = tl.load(logits_ptr + at, mask=listed, other=float("-inf"))
    normalizer = add_log_masses(log_mass(logits, 0), log_mass(mass, 0))
    finite = (normalizer - normalizer) == 0.0
    tl.store(normalizer_ptr + row, normalizer)
    tl.store(finite_ptr + row, finite)
    # Two reductions of 32 bits are faster than one of 64.
    order = tl.where(listed, order_of(logits), -0x80000000)
    ids = tl.maximum(ids, 0).to(tl.int32)
    for rank in tl.static_range(TOPK):
        best = tl.max(order, axis=0)
        best_id = tl.min(tl.where(order == best, ids, 0x7FFFFFFF), axis=0)
        chosen = (order == best) & (ids == best_id)
        log_prob = tl.where(finite, score_of(best) - normalizer, float("-inf"))
        tl.store(log_probs_ptr + row * TOPK + rank, log_prob)
        tl.store(top_ids_ptr + row * TOPK + rank, tl.where(finite, best_id, rank).to(tl.int64))
        order = tl.where(chosen, -0x80000000, order)


def gather_dot(x: Tensor, weight: Tensor, ids: Tensor | None) -> Tensor:
    """Products with listed rows of a matrix, or with all of them.

    Args:
        x: [N, H] contiguous.
        weight: [V, H] contiguous along H, in the dtype of `x`.
        ids: [N, C] int64 contiguous rows of `weight`, -1 for padding; None stands for all rows.

    Returns:
        [N, C] float32, minus infinity for padding; without `ids` [N, V] in the dtype of `x`.
    """
    num_rows, hidden = x.shape
    count = weight.shape[0] if ids is None else ids.shape[1]
    dtype = x.dtype if ids is None else torch.float32
    out = torch.empty(num_rows, count, dtype=dtype, device=x.device)
    block_h = min(MOST_HIDDEN, triton.next_power_of_2(hidden))
    block_c = min(16, BLOCK_ELEMENTS // block_h)
    gather_dot_kernel[triton.cdiv(count, block_c), num_rows](
        x, weight, ids, out, count, x.stride(0), weight.stride(0), out.stride(0),
        HAS_IDS=ids is not None,
        HIDDEN=hidden,
        BLOCK_H=block_h,
        BLOCK_C=block_c,
        num_warps=4,
        **launch_options(x.device),
    )  # fmt: skip
    return out


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
    rank_candidates_kernel[num_rows,](
        candidates, logits, mass, *result, count, mass.shape[1],
        TOPK=topk,
        BLOCK_C=block_c,
        BLOCK_T=triton.next_power_of_2(mass.shape[1]),
        num_warps=4 if block_c <= 1024 else 8,  # noqa: PLR2004 (a row fits in registers)
        **launch_options(device),
    )  # fmt: skip
    return result
