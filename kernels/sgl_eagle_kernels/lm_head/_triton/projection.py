"""The low-rank inputs of a few rows."""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from sgl_eagle_kernels.launch import launch_options, leave_shared_memory
from sgl_eagle_kernels.lm_head._triton.order import await_inputs
from sgl_eagle_kernels.lm_head._triton.prefetch import prefetch
from sgl_eagle_kernels.lm_head._triton.stage2 import BLOCK_ELEMENTS, choose_hidden_block
from sgl_eagle_kernels.lm_head.head import TwoStageHead

MOST_PROJECTED_ROWS = 8
"""Beyond these, tensor cores read `down` once for all rows, where our kernel reads it for each."""
NUM_WARPS = 4


@triton.jit
def project_kernel(
    x_ptr,
    down_ptr,
    out_ptr,
    stride_x_row,
    stride_out_row,
    RANK: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HINTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Products of one row's input with some rows of `down`."""
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_R
    if row == 0:
        prefetch(down_ptr, first * HIDDEN, BLOCK_R * HIDDEN, RANK * HIDDEN, HINTS, OVERLAP)
    lane = first + tl.arange(0, BLOCK_R)
    await_inputs(OVERLAP)
    total = tl.zeros((BLOCK_R,), tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        w = tl.load(
            down_ptr + lane[:, None] * HIDDEN + h[None, :],
            mask=(lane < RANK)[:, None] & (h < HIDDEN)[None, :],
            other=0.0,
        )
        x = tl.load(x_ptr + row * stride_x_row + h, mask=h < HIDDEN, other=0.0)
        total += tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_out_row + lane, out, mask=lane < RANK)


def project(head_input: Tensor, head: TwoStageHead) -> Tensor:
    """Low-rank inputs.

    Args:
        head_input: [N, H] contiguous.
        head: Weights.

    Returns:
        [N, R] in the same dtype.
    """
    num_rows, hidden = head_input.shape
    if num_rows > MOST_PROJECTED_ROWS:
        return functional.linear(head_input, head.down)
    rank = len(head.down)
    out = torch.empty(num_rows, rank, dtype=head_input.dtype, device=head_input.device)
    block_h = choose_hidden_block(hidden)
    block_r = min(16, BLOCK_ELEMENTS // block_h)
    kernel = project_kernel[triton.cdiv(rank, block_r), num_rows](
        head_input, head.down, out, head_input.stride(0), out.stride(0),
        RANK=rank,
        HIDDEN=hidden,
        BLOCK_H=block_h,
        BLOCK_R=block_r,
        HINTS=32 * NUM_WARPS,
        num_warps=NUM_WARPS,
        **launch_options(head_input.device),
    )  # fmt: skip
    leave_shared_memory(kernel)
    return out
