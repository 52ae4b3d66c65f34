"""Stage 1, local: the best of every tile of the vocabulary; scores stay on chip.

Programs walk over tiles, so that the next part of `up` is on its way while this one is ranked.
"""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_eagle_kernels.launch import launch_options
from sgl_eagle_kernels.lm_head._triton.lanes import see_nothing, see_part, sum_rest, take_best
from sgl_eagle_kernels.lm_head._triton.order import await_inputs, log_mass
from sgl_eagle_kernels.lm_head._triton.tiles import (
    MIN_DOT,
    PART,
    add_products,
    choose_blocks,
    load_inputs,
)
from sgl_eagle_kernels.lm_head.head import LocalTop, TwoStageHead


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_tiles"])
def best_of_tile_kernel(
    x_ptr,
    up_ptr,
    scale_ptr,
    ids_ptr,
    candidates_ptr,
    chosen_ptr,
    mass_ptr,
    num_rows,
    num_tokens,
    num_tiles,
    stride_x_row,
    stride_up_row,
    HAS_SCALE: tl.constexpr,
    HAS_IDS: tl.constexpr,
    TILE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The best token of every tile for some rows, and the log mass of the rest of the tile.

    A tile is read in parts. Each lane keeps the best score that it has seen, and the mass of the
    others relative to it; lanes are compared once a tile.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, rows64 = rows < num_rows, rows.to(tl.int64)
    walker = tl.program_id(1)
    num_walkers = tl.num_programs(1)
    lane = tl.arange(0, BLOCK_V)
    whole_k = tl.arange(0, BLOCK_K)
    k_steps: tl.constexpr = (RANK + BLOCK_K - 1) // BLOCK_K
    parts: tl.constexpr = (TILE + BLOCK_V - 1) // BLOCK_V
    await_inputs(OVERLAP)
    # Without steps over the rank it is loaded once.
    whole_x = load_inputs(x_ptr, rows, whole_k, num_rows, stride_x_row, RANK)
    scores = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    best, best_place, second, second_place, beyond, rest = see_nothing(BLOCK_N, BLOCK_V)
    for step in range((num_tiles - walker + num_walkers - 1) // num_walkers * (parts * k_steps)):
        tile = walker + step // (parts * k_steps) * num_walkers
        part = step // k_steps % parts
        tokens = tile * TILE + part * BLOCK_V + lane
        inside = (tokens < num_tokens) & (part * BLOCK_V + lane < TILE)
        if k_steps > 1:
            k = step % k_steps * BLOCK_K + tl.arange(0, BLOCK_K)
            x = load_inputs(x_ptr, rows, k, num_rows, stride_x_row, RANK)
        else:
            k, x = whole_k, whole_x
        scores = add_products(scores, x, up_ptr, tokens, inside, k, stride_up_row, RANK, BLOCK_K)
        if step % k_steps == k_steps - 1:
            if HAS_SCALE:
                scores *= tl.load(scale_ptr + tokens, mask=inside, other=0.0)[None, :]
            best, best_place, second, second_place, beyond, rest = see_part(
                scores,
                inside[None, :],
                (part * BLOCK_V + lane)[None, :],
                best,
                best_place,
                second,
                second_place,
                beyond,
                rest,
                1,
            )
            scores = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
            if part == parts - 1:
                value, place, best, best_place, second = take_best(
                    best, best_place, second, second_place, 1, 1
                )
                mass = sum_rest(best, second, beyond, rest, 1)
                tl.store(mass_ptr + rows64 * num_tiles + tile, mass, mask=row_mask)
                real = value > float("-inf")
                token = tile * TILE + place
                if HAS_IDS:
                    token = tl.load(ids_ptr + token, mask=row_mask & real, other=0)
                token = tl.where(real, token, -1).to(tl.int64)
                tl.store(candidates_ptr + rows64 * num_tiles + tile, token, mask=row_mask)
                tl.store(chosen_ptr + rows64 * num_tiles + tile, value, mask=row_mask)
                best, best_place, _, _, beyond, rest = see_nothing(BLOCK_N, BLOCK_V)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_tiles"])
def top_of_tile_kernel(
    x_ptr,
    up_ptr,
    scale_ptr,
    ids_ptr,
    candidates_ptr,
    chosen_ptr,
    mass_ptr,
    num_rows,
    num_tokens,
    num_tiles,
    stride_x_row,
    stride_up_row,
    HAS_SCALE: tl.constexpr,
    HAS_IDS: tl.constexpr,
    TILE: tl.constexpr,
    PER_TILE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Several best tokens of every tile for some rows, and the log mass of the rest of the tile."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < num_rows
    rows64 = rows.to(tl.int64)
    walker = tl.program_id(1)
    num_walkers = tl.num_programs(1)
    lane = tl.arange(0, BLOCK_V)
    k_steps: tl.constexpr = (RANK + BLOCK_K - 1) // BLOCK_K
    await_inputs(OVERLAP)
    scores = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for step in range(((num_tiles - walker + num_walkers - 1) // num_walkers) * k_steps):
        tile = walker + (step // k_steps) * num_walkers
        tokens = tile * TILE + lane
        inside = (lane < TILE) & (tokens < num_tokens)
        k = (step % k_steps) * BLOCK_K + tl.arange(0, BLOCK_K)
        x = load_inputs(x_ptr, rows, k, num_rows, stride_x_row, RANK)
        scores = add_products(scores, x, up_ptr, tokens, inside, k, stride_up_row, RANK, BLOCK_K)
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
                at = (rows64 * num_tiles + tile) * PER_TILE + rank
                token = tl.where(real, token, -1).to(tl.int64)
                tl.store(candidates_ptr + at, token, mask=row_mask)
                tl.store(chosen_ptr + at, value, mask=row_mask)
                broken = broken | (value == float("inf")).to(tl.int32)
                chosen = (lane[None, :] == place[:, None]) & real[:, None]
                rest = tl.where(chosen, float("-inf"), rest)
                ranked = tl.where(chosen, float("-inf"), ranked)
            mass = tl.where(broken != 0, float("nan"), log_mass(rest, 1))
            tl.store(mass_ptr + rows64 * num_tiles + tile, mass, mask=row_mask)
            scores = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)


def find_local(x: Tensor, head: TwoStageHead, shortlist: LocalTop) -> tuple[Tensor, Tensor, Tensor]:
    """The best tokens of every tile, in one launch.

    Args:
        x: [N, R] contiguous low-rank inputs.
        head: Weights.
        shortlist: Tiles.

    Returns:
        [N, C] int64 candidates, -1 for padding, [N, C] float32 low-rank scores, minus infinity for
        padding, and [N, T] float32 log mass dropped in each tile.
    """
    num_rows, rank = x.shape
    per_tile = shortlist.per_tile
    num_tiles = triton.cdiv(head.num_tokens, shortlist.tile_size)
    candidates = torch.empty(num_rows, num_tiles * per_tile, dtype=torch.int64, device=x.device)
    chosen = torch.empty(candidates.shape, dtype=torch.float32, device=x.device)
    mass = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=x.device)
    blocks = choose_blocks(x, _choose_part(head, shortlist, num_rows), num_tiles)
    kernel = best_of_tile_kernel if per_tile == 1 else top_of_tile_kernel
    kernel[triton.cdiv(num_rows, blocks.rows), blocks.walkers](
        x, head.up, head.up_scale, head.ids, candidates, chosen, mass,
        num_rows, head.num_tokens, num_tiles,
        x.stride(0), head.up.stride(0),
        HAS_SCALE=head.up_scale is not None,
        HAS_IDS=head.ids is not None,
        TILE=shortlist.tile_size,
        RANK=rank,
        BLOCK_K=blocks.rank,
        BLOCK_N=blocks.rows,
        BLOCK_V=blocks.tokens,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        **({} if per_tile == 1 else {"PER_TILE": per_tile}),
        **launch_options(x.device),
    )  # fmt: skip
    return candidates, chosen, mass


def _choose_part(head: TwoStageHead, shortlist: LocalTop, num_rows: int) -> int:
    # Tokens that are scored together. Several best of a tile are found among all its scores, and
    # int8 is converted in wide tiles of few columns.
    if shortlist.per_tile > 1 or head.up_scale is not None:
        return shortlist.tile_size
    return min(shortlist.tile_size, PART if num_rows <= MIN_DOT else PART // 2)
