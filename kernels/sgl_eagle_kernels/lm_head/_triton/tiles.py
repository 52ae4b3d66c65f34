"""Stage 1 in parts: how it is cut into programs, and the products of one part."""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sgl_eagle_kernels.launch import count_multiprocessors, shared_memory_bytes

MIN_DOT = 16  # smallest side of a matrix product on tensor cores
MOST_ROWS = 64  # of one program: more would spill the scores
MOST_PART = 16384  # elements of `up` that are loaded at a time: a few such parts fit on chip
LEAST_RANK_BLOCK, MOST_RANK_BLOCK = 64, 256
MOST_STAGES = 4  # one is computed on while the others are on their way
PART = 64  # tokens that are scored together, so that much of `up` is under way at any time


class TileBlocks(NamedTuple):
    """How stage 1 is cut into programs.

    Attributes:
        rows: Rows of one program.
        rank: Part of the rank that is loaded at a time.
        tokens: Power of two that holds the tokens scored together.
        walkers: Programs that share the tiles of the same rows.
        warps: Of one program.
        stages: Depth of Triton's software pipeline.
    """

    rows: int
    rank: int
    tokens: int
    walkers: int
    warps: int
    stages: int


@triton.jit
def load_inputs(x_ptr, rows, k, num_rows, stride_x_row, RANK: tl.constexpr):
    """[BLOCK_N, BLOCK_K] part of the low-rank inputs, zero where there is none."""
    at = x_ptr + rows.to(tl.int64)[:, None] * stride_x_row + k[None, :]
    return tl.load(at, mask=(rows < num_rows)[:, None] & (k < RANK)[None, :], other=0.0)


@triton.jit
def add_products(
    scores,
    x,
    up_ptr,
    tokens,
    inside,
    k,
    stride_up_row,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add the products of `load_inputs` with a part of `up` to [BLOCK_N, BLOCK_V] scores."""
    mask = inside[None, :]
    if RANK % BLOCK_K != 0:
        mask = mask & (k < RANK)[:, None]
    at = up_ptr + tokens.to(tl.int64)[None, :] * stride_up_row + k[:, None]
    up = tl.load(at, mask=mask, other=0.0)
    # Full float32 products where the weights are float32: no-op for half precision.
    return tl.dot(x, up.to(x.dtype), acc=scores, input_precision="ieee")


def choose_blocks(x: Tensor, num_part_tokens: int, num_tiles: int) -> TileBlocks:
    """Cut stage 1 into programs.

    Args:
        x: [N, R] low-rank inputs.
        num_part_tokens: Tokens scored together.
        num_tiles: Tiles that programs walk over.

    Returns:
        Sizes of one program and of the grid.
    """
    num_rows, rank = x.shape
    rows = max(MIN_DOT, min(MOST_ROWS, triton.next_power_of_2(num_rows)))
    tokens = max(MIN_DOT, triton.next_power_of_2(num_part_tokens))
    per_row_block = 2 * count_multiprocessors(x.device) // triton.cdiv(num_rows, rows)
    shared_bytes = shared_memory_bytes(x.device)
    column_bytes = (rows + tokens) * x.element_size()  # of inputs and `up` together
    most_rank = min(MOST_RANK_BLOCK, MOST_PART // tokens)
    while most_rank * column_bytes > shared_bytes:
        most_rank //= 2
    rank_block = _choose_rank_block(rank, most_rank)
    return TileBlocks(
        rows=rows,
        rank=rank_block,
        tokens=tokens,
        walkers=max(1, min(num_tiles, per_row_block)),
        warps=4 if rows * tokens <= 4096 else 8,  # noqa: PLR2004 (32 scores a thread)
        stages=max(2, min(MOST_STAGES, 1 + shared_bytes // (rank_block * column_bytes))),
    )


def _choose_rank_block(rank: int, most: int) -> int:
    # Little padding, then few steps: where whole rows fit, parts of `up` are contiguous.
    block = max(MIN_DOT, min(most, int(triton.next_power_of_2(rank))))
    blocks = [block]
    while block > LEAST_RANK_BLOCK:
        block //= 2
        blocks.append(block)
    return min(blocks, key=lambda size: (-(-rank // size) * size, -size))
