"""Exact logits, by gathered rows of the full head."""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_eagle_kernels.launch import launch_options, leave_shared_memory
from sgl_eagle_kernels.lm_head._triton.order import await_inputs

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
    kernel = gather_dot_kernel[triton.cdiv(count, block_c), num_rows](
        x, weight, ids, out, count, x.stride(0), weight.stride(0), out.stride(0),
        HIDDEN=hidden,
        BLOCK_H=block_h,
        BLOCK_C=block_c,
        num_warps=4,
        **launch_options(x.device),
    )  # fmt: skip
    leave_shared_memory(kernel)
    return out


def choose_hidden_block(hidden: int) -> int:
    """Part of a row of a matrix that is loaded at a time.

    Args:
        hidden: H.

    Returns:
        A power of two.
    """
    return min(MOST_HIDDEN, int(triton.next_power_of_2(hidden)))
