"""Stage 1: low-rank scores of the vocabulary, tile by tile, read once.

Programs walk over tiles, so that the next tile is on its way while this one is ranked. The local
kernel keeps scores on chip; the global one writes them, with the best and the log mass of every
group of tokens.
"""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_eagle_kernels.launch import (
    count_multiprocessors,
    launch_options,
    overlaps_launches,
)
from sgl_eagle_kernels.lm_head._triton.order import await_inputs, log_mass
from sgl_eagle_kernels.lm_head.head import LocalTop, TwoStageHead

MIN_DOT = 16  # smallest side of a matrix product on tensor cores
MOST_ROWS = 64  # of one program: more would spill the scores
SCORE_TILE = 128


class TileBlocks(NamedTuple):
    """How stage 1 is cut into programs.

    Attributes:
        rows: Rows of one program.
        rank: Part of the rank that is loaded at a time.
        tokens: Power of two that holds a tile.
        walkers: Programs that share the tiles of the same rows.
        warps: Of one program.
        stages: Loads in flight.
    """

    rows: int
    rank: int
    tokens: int
    walkers: int
    warps: int
    stages: int


@triton.jit
def _add_products(
    scores,
    x_ptr,
    up_ptr,
    rows,
    tokens,
    inside,
    start,
    num_rows,
    stride_x_row,
    stride_up_row,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    k = start + tl.arange(0, BLOCK_K)
    x_mask = (rows < num_rows)[:, None]
    up_mask = inside[None, :]
    if RANK % BLOCK_K != 0:
        x_mask = x_mask & (k < RANK)[None, :]
        up_mask = up_mask & (k < RANK)[:, None]
    x_at = x_ptr + rows.to(tl.int64)[:, None] * stride_x_row + k[None, :]
    up_at = up_ptr + tokens.to(tl.int64)[None, :] * stride_up_row + k[:, None]
    x = tl.load(x_at, mask=x_mask, other=0.0)
    up = tl.load(up_at, mask=up_mask, other=0.0)
    # Full float32 products where the weights are float32: no-op for half precision.
    return tl.dot(x, up.to(x.dtype), acc=scores, input_precision="ieee")


@triton.jit
def _prefetch_tile(up_ptr, tokens, num_tokens, stride_up_row, RANK: tl.constexpr):
    # Ask for one row of `up` a lane to come to the last cache; weights need not be waited for.
    rows = up_ptr + tl.minimum(tokens, num_tokens - 1).to(tl.int64) * stride_up_row
    row_bytes: tl.constexpr = RANK * up_ptr.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [rows.to(tl.int64), tl.full(tokens.shape, row_bytes, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_tiles"])
def local_top_kernel(
    x_ptr,
    up_ptr,
    scale_ptr,
    ids_ptr,
    candidates_ptr,
    mass_ptr,
    num_rows,
    num_tokens,
    num_tiles,
    stride_x_row,
    stride_up_row,
    stride_candidates_row,
    stride_mass_row,
    HAS_SCALE: tl.constexpr,
    HAS_IDS: tl.constexpr,
    TILE: tl.constexpr,
    PER_TILE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Best tokens of every tile for some rows, and the log mass of the rest of the tile."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < num_rows
    rows64 = rows.to(tl.int64)
    walker = tl.program_id(1)
    num_walkers = tl.num_programs(1)
    lane = tl.arange(0, BLOCK_V)
    if PREFETCH:
        _prefetch_tile(up_ptr, walker * TILE + lane, num_tokens, stride_up_row, RANK)
    await_inputs(OVERLAP)
    k_steps: tl.constexpr = (RANK + BLOCK_K - 1) // BLOCK_K
    scores = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for step in range(((num_tiles - walker + num_walkers - 1) // num_walkers) * k_steps):
        tile = walker + (step // k_steps) * num_walkers
        tokens = tile * TILE + lane
        inside = (lane < TILE) & (tokens < num_tokens)
        scores = _add_products(
            scores, x_ptr, up_ptr, rows, tokens, inside, (step % k_steps) * BLOCK_K, num_rows,
            stride_x_row, stride_up_row, RANK, BLOCK_K,
        )  # fmt: skip
        if step % k_steps == k_steps - 1:
            if HAS_SCALE:
                scores *= tl.load(scale_ptr + tokens, mask=inside, other=0.0)[None, :]
            rest = tl.where(inside[None, :], scores, float("-inf"))
            ranked = tl.where(rest == rest, rest, float("-inf"))
            broken = tl.zeros((BLOCK_N,), tl.int32)
            for rank in tl.static_range(PER_TILE):
                # Lanes of a tile ascend with token ids, so the first of equals is the lowest id.
                value, place = tl.max(ranked, axis=1, return_indices=True)
                real = value > float("-inf")
                token = tile * TILE + place
                if HAS_IDS:
                    token = tl.load(ids_ptr + token, mask=row_mask & real, other=0)
                tl.store(
                    candidates_ptr + rows64 * stride_candidates_row + tile * PER_TILE + rank,
                    tl.where(real, token, -1).to(tl.int64),
                    mask=row_mask,
                )
                broken = broken | (value == float("inf")).to(tl.int32)
                chosen = (lane[None, :] == place[:, None]) & real[:, None]
                rest = tl.where(chosen, float("-inf"), rest)
                ranked = tl.where(chosen, float("-inf"), ranked)
            mass = tl.where(broken != 0, float("nan"), log_mass(rest, 1))
            tl.store(mass_ptr + rows64 * stride_mass_row + tile, mass, mask=row_mask)
            scores = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_tiles"])
def score_groups_kernel(
    x_ptr,
    up_ptr,
    scale_ptr,
    scores_ptr,
    best_ptr,
    mass_ptr,
    num_rows,
    num_tokens,
    num_tiles,
    stride_x_row,
    stride_up_row,
    stride_scores_row,
    stride_group_row,
    HAS_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """All scores, NaN as minus infinity, and of each group the best score and the log mass."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = (rows < num_rows)[:, None]
    rows64 = rows.to(tl.int64)[:, None]
    walker = tl.program_id(1)
    num_walkers = tl.num_programs(1)
    if PREFETCH:
        first = walker * BLOCK_V + tl.arange(0, BLOCK_V)
        _prefetch_tile(up_ptr, first, num_tokens, stride_up_row, RANK)
    await_inputs(OVERLAP)
    k_steps: tl.constexpr = (RANK + BLOCK_K - 1) // BLOCK_K
    per_tile: tl.constexpr = BLOCK_V // GROUP
    scores = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for step in range(((num_tiles - walker + num_walkers - 1) // num_walkers) * k_steps):
        tile = walker + (step // k_steps) * num_walkers
        tokens = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = tokens < num_tokens
        scores = _add_products(
            scores, x_ptr, up_ptr, rows, tokens, inside, (step % k_steps) * BLOCK_K, num_rows,
            stride_x_row, stride_up_row, RANK, BLOCK_K,
        )  # fmt: skip
        if step % k_steps == k_steps - 1:
            if HAS_SCALE:
                scores *= tl.load(scale_ptr + tokens, mask=inside, other=0.0)[None, :]
            scores = tl.where(inside[None, :], scores, float("-inf"))
            ranked = tl.where(scores == scores, scores, float("-inf"))
            at = scores_ptr + rows64 * stride_scores_row + tokens[None, :]
            tl.store(at, ranked, mask=row_mask & inside[None, :])
            groups = tile * per_tile + tl.arange(0, per_tile)
            at_group = rows64 * stride_group_row + groups[None, :]
            group_mask = row_mask & (groups * GROUP < num_tokens)[None, :]
            best = tl.max(tl.reshape(ranked, (BLOCK_N, per_tile, GROUP)), axis=2)
            tl.store(best_ptr + at_group, best, mask=group_mask)
            mass = log_mass(tl.reshape(scores, (BLOCK_N, per_tile, GROUP)), 2)
            tl.store(mass_ptr + at_group, mass, mask=group_mask)
            scores = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)


def _can_prefetch(up: Tensor) -> bool:
    # Rows are asked for in units of 16 bytes.
    row_bytes = up.shape[1] * up.element_size()
    return overlaps_launches(up.device) and row_bytes % 16 == 0 and up.data_ptr() % 16 == 0


def find_local(x: Tensor, head: TwoStageHead, shortlist: LocalTop) -> tuple[Tensor, Tensor]:
    """The best tokens of every tile, in one launch.

    Args:
        x: [N, R] contiguous low-rank inputs.
        head: Weights.
        shortlist: Tiles.

    Returns:
        [N, C] int64 candidates, -1 for padding, and [N, T] float32 log mass dropped in each tile.
    """
    num_rows, rank = x.shape
    num_tiles = triton.cdiv(head.num_tokens, shortlist.tile_size)
    candidates = torch.empty(
        num_rows, num_tiles * shortlist.per_tile, dtype=torch.int64, device=x.device
    )
    mass = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=x.device)
    blocks = choose_blocks(x, shortlist.tile_size, num_tiles)
    local_top_kernel[triton.cdiv(num_rows, blocks.rows), blocks.walkers](
        x, head.up, head.up_scale, head.ids, candidates, mass,
        num_rows, head.num_tokens, num_tiles,
        x.stride(0), head.up.stride(0), candidates.stride(0), mass.stride(0),
        HAS_SCALE=head.up_scale is not None,
        HAS_IDS=head.ids is not None,
        TILE=shortlist.tile_size,
        PER_TILE=shortlist.per_tile,
        RANK=rank,
        BLOCK_K=blocks.rank,
        BLOCK_N=blocks.rows,
        BLOCK_V=blocks.tokens,
        PREFETCH=_can_prefetch(head.up),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        **launch_options(x.device),
    )  # fmt: skip
    return candidates, mass


def score_groups(x: Tensor, head: TwoStageHead, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of the whole vocabulary and what is best in each group of tokens, in one launch.

    Args:
        x: [N, R] contiguous low-rank inputs.
        head: Weights.
        group_size: Tokens in a group, a power of two up to `SCORE_TILE`.

    Returns:
        [N, V] float32 scores, and of each of G groups [N, G] float32 best score and log mass, which
        is NaN where a score is NaN or plus infinity.
    """
    num_rows, rank = x.shape
    num_tokens = head.num_tokens
    num_tiles = triton.cdiv(num_tokens, SCORE_TILE)
    num_groups = triton.cdiv(num_tokens, group_size)
    scores = torch.empty(num_rows, num_tokens, dtype=torch.float32, device=x.device)
    best = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x.device)
    mass = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x.device)
    blocks = choose_blocks(x, SCORE_TILE, num_tiles)
    score_groups_kernel[triton.cdiv(num_rows, blocks.rows), blocks.walkers](
        x, head.up, head.up_scale, scores, best, mass,
        num_rows, num_tokens, num_tiles,
        x.stride(0), head.up.stride(0), scores.stride(0), best.stride(0),
        HAS_SCALE=head.up_scale is not None,
        GROUP=group_size,
        RANK=rank,
        BLOCK_K=blocks.rank,
        BLOCK_N=blocks.rows,
        BLOCK_V=blocks.tokens,
        PREFETCH=_can_prefetch(head.up),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        **launch_options(x.device),
    )  # fmt: skip
    return scores, best, mass


def choose_blocks(x: Tensor, tile_size: int, num_tiles: int) -> TileBlocks:
    """Cut stage 1 into programs.

    Args:
        x: [N, R] low-rank inputs.
        tile_size: Tokens in a tile.
        num_tiles: T.

    Returns:
        Sizes of one program and of the grid.
    """
    num_rows, rank = x.shape
    rows = max(MIN_DOT, min(MOST_ROWS, triton.next_power_of_2(num_rows)))
    tokens = max(MIN_DOT, triton.next_power_of_2(tile_size))
    per_row_block = 2 * count_multiprocessors(x.device) // triton.cdiv(num_rows, rows)
    return TileBlocks(
        rows=rows,
        rank=min(64, max(MIN_DOT, triton.next_power_of_2(rank))),
        tokens=tokens,
        walkers=max(1, min(num_tiles, per_row_block)),
        warps=4 if rows * tokens <= 4096 else 8,  # noqa: PLR2004 (32 scores a thread)
        stages=3,
    )
