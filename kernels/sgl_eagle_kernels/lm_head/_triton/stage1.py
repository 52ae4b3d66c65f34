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

from sgl_eagle_kernels.launch import count_multiprocessors, launch_options
from sgl_eagle_kernels.lm_head._triton.order import await_inputs, log_mass
from sgl_eagle_kernels.lm_head.head import LocalTop, TwoStageHead

MIN_DOT = 16  # smallest side of a matrix product on tensor cores
MOST_ROWS = 64  # of one program: more would spill the scores
MOST_PART = 16384  # elements of `up` that are loaded at a time: a few such parts fit on chip
LEAST_RANK_BLOCK = 64
PART = 64  # tokens that are scored together, so that much of `up` is under way at any time


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
def _load_inputs(x_ptr, rows, k, num_rows, stride_x_row, RANK: tl.constexpr):
    at = x_ptr + rows.to(tl.int64)[:, None] * stride_x_row + k[None, :]
    return tl.load(at, mask=(rows < num_rows)[:, None] & (k < RANK)[None, :], other=0.0)


@triton.jit
def _add_products(
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
    # scores: [BLOCK_N, BLOCK_V] float32, x: [BLOCK_N, BLOCK_K].
    mask = inside[None, :]
    if RANK % BLOCK_K != 0:
        mask = mask & (k < RANK)[:, None]
    at = up_ptr + tokens.to(tl.int64)[None, :] * stride_up_row + k[:, None]
    up = tl.load(at, mask=mask, other=0.0)
    # Full float32 products where the weights are float32: no-op for half precision.
    return tl.dot(x, up.to(x.dtype), acc=scores, input_precision="ieee")


@triton.jit
def _see_nothing(BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr):
    nothing = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    return nothing - float("inf"), nothing.to(tl.int32), nothing - float("inf"), nothing


@triton.jit
def _see_part(scores, inside, part, best, best_part, second, rest):
    # Of each lane: the best score so far, the part it came from, the second best, and the mass of
    # all but the best relative to the second: relative to the best it might underflow.
    broken = inside[None, :] & ((scores != scores) | (scores == float("inf")))
    scores = tl.where(inside[None, :] & (scores == scores), scores, float("-inf"))
    # Of equals the first stays: parts ascend with token ids.
    wins = scores > best
    loser = tl.minimum(scores, best)
    best = tl.maximum(scores, best)
    low, high = tl.minimum(loser, second), tl.maximum(loser, second)
    lower_mass = tl.where(low == float("-inf"), 0.0, tl.exp(low - high))
    rest = tl.where(loser > second, rest * lower_mass + 1.0, rest + lower_mass)
    return best, tl.where(wins, part, best_part), high, tl.where(broken, float("nan"), rest)


@triton.jit
def _close_tile(best, places, second, rest):
    # Of each row: the best score of all lanes, its place, the lowest among equals, and the log mass
    # of all else.
    value = tl.max(best, axis=1)
    place = tl.min(tl.where(best == value[:, None], places, 0x7FFFFFFF), axis=1)
    other = tl.where(places == place[:, None], float("-inf"), best)
    shift = tl.max(tl.maximum(other, second), axis=1)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    lane_mass = tl.exp(other - shift[:, None]) + tl.exp(second - shift[:, None]) * rest
    total = tl.sum(lane_mass, axis=1)
    # The interpreter warns of the logarithm of zero.
    mass = shift + tl.log(tl.where(total == 0.0, 1.0, total))
    return value, place, tl.where(total == 0.0, float("-inf"), mass)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_tiles"])
def best_of_tile_kernel(
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
    whole_x = _load_inputs(x_ptr, rows, whole_k, num_rows, stride_x_row, RANK)
    scores = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    best, best_part, second, rest = _see_nothing(BLOCK_N, BLOCK_V)
    for step in range((num_tiles - walker + num_walkers - 1) // num_walkers * (parts * k_steps)):
        tile = walker + step // (parts * k_steps) * num_walkers
        part = step // k_steps % parts
        tokens = tile * TILE + part * BLOCK_V + lane
        inside = (tokens < num_tokens) & (part * BLOCK_V + lane < TILE)
        if k_steps > 1:
            k = step % k_steps * BLOCK_K + tl.arange(0, BLOCK_K)
            x = _load_inputs(x_ptr, rows, k, num_rows, stride_x_row, RANK)
        else:
            k, x = whole_k, whole_x
        scores = _add_products(scores, x, up_ptr, tokens, inside, k, stride_up_row, RANK, BLOCK_K)
        if step % k_steps == k_steps - 1:
            if HAS_SCALE:
                scores *= tl.load(scale_ptr + tokens, mask=inside, other=0.0)[None, :]
            best, best_part, second, rest = _see_part(
                scores, inside, part, best, best_part, second, rest
            )
            scores = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
            if part == parts - 1:
                places = best_part * BLOCK_V + lane[None, :]
                value, place, mass = _close_tile(best, places, second, rest)
                tl.store(mass_ptr + rows64 * num_tiles + tile, mass, mask=row_mask)
                real = value > float("-inf")
                token = tile * TILE + place
                if HAS_IDS:
                    token = tl.load(ids_ptr + token, mask=row_mask & real, other=0)
                token = tl.where(real, token, -1).to(tl.int64)
                tl.store(candidates_ptr + rows64 * num_tiles + tile, token, mask=row_mask)
                best, best_part, second, rest = _see_nothing(BLOCK_N, BLOCK_V)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_tiles"])
def top_of_tile_kernel(
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
        x = _load_inputs(x_ptr, rows, k, num_rows, stride_x_row, RANK)
        scores = _add_products(scores, x, up_ptr, tokens, inside, k, stride_up_row, RANK, BLOCK_K)
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
                    candidates_ptr + (rows64 * num_tiles + tile) * PER_TILE + rank,
                    tl.where(real, token, -1).to(tl.int64),
                    mask=row_mask,
                )
                broken = broken | (value == float("inf")).to(tl.int32)
                chosen = (lane[None, :] == place[:, None]) & real[:, None]
                rest = tl.where(chosen, float("-inf"), rest)
                ranked = tl.where(chosen, float("-inf"), ranked)
            mass = tl.where(broken != 0, float("nan"), log_mass(rest, 1))
            tl.store(mass_ptr + rows64 * num_tiles + tile, mass, mask=row_mask)
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
    OVERLAP: tl.constexpr,
):
    """All scores, NaN as minus infinity, and of each group the best score and the log mass."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = (rows < num_rows)[:, None]
    rows64 = rows.to(tl.int64)[:, None]
    walker = tl.program_id(1)
    num_walkers = tl.num_programs(1)
    whole_k = tl.arange(0, BLOCK_K)
    k_steps: tl.constexpr = (RANK + BLOCK_K - 1) // BLOCK_K
    per_tile: tl.constexpr = BLOCK_V // GROUP
    await_inputs(OVERLAP)
    # Without steps over the rank it is loaded once.
    whole_x = _load_inputs(x_ptr, rows, whole_k, num_rows, stride_x_row, RANK)
    scores = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for step in range(((num_tiles - walker + num_walkers - 1) // num_walkers) * k_steps):
        tile = walker + (step // k_steps) * num_walkers
        tokens = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = tokens < num_tokens
        if k_steps > 1:
            k = step % k_steps * BLOCK_K + tl.arange(0, BLOCK_K)
            x = _load_inputs(x_ptr, rows, k, num_rows, stride_x_row, RANK)
        else:
            k, x = whole_k, whole_x
        scores = _add_products(scores, x, up_ptr, tokens, inside, k, stride_up_row, RANK, BLOCK_K)
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
    per_tile = shortlist.per_tile
    num_tiles = triton.cdiv(head.num_tokens, shortlist.tile_size)
    candidates = torch.empty(num_rows, num_tiles * per_tile, dtype=torch.int64, device=x.device)
    mass = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=x.device)
    blocks = choose_blocks(x, _choose_part(head, shortlist, num_rows), num_tiles)
    kernel = best_of_tile_kernel if per_tile == 1 else top_of_tile_kernel
    kernel[triton.cdiv(num_rows, blocks.rows), blocks.walkers](
        x, head.up, head.up_scale, head.ids, candidates, mass,
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
    return candidates, mass


def _choose_part(head: TwoStageHead, shortlist: LocalTop, num_rows: int) -> int:
    # Tokens that are scored together. Several best of a tile are found among all its scores, and
    # int8 is converted in wide tiles of few columns.
    if shortlist.per_tile > 1 or head.up_scale is not None:
        return shortlist.tile_size
    return min(shortlist.tile_size, PART if num_rows <= MIN_DOT else PART // 2)


def score_groups(x: Tensor, head: TwoStageHead, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of the whole vocabulary and what is best in each group of tokens, in one launch.

    Args:
        x: [N, R] contiguous low-rank inputs.
        head: Weights.
        group_size: Tokens in a group, a power of two up to `PART`.

    Returns:
        [N, V] float32 scores, and of each of G groups [N, G] float32 best score and log mass, which
        is NaN where a score is NaN or plus infinity.
    """
    num_rows, rank = x.shape
    num_tokens = head.num_tokens
    num_tiles = triton.cdiv(num_tokens, PART)
    num_groups = triton.cdiv(num_tokens, group_size)
    scores = torch.empty(num_rows, num_tokens, dtype=torch.float32, device=x.device)
    best = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x.device)
    mass = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x.device)
    blocks = choose_blocks(x, PART, num_tiles)
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
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        **launch_options(x.device),
    )  # fmt: skip
    return scores, best, mass


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
    return TileBlocks(
        rows=rows,
        rank=_choose_rank_block(rank, MOST_PART // tokens),
        tokens=tokens,
        walkers=max(1, min(num_tiles, per_row_block)),
        warps=4 if rows * tokens <= 4096 else 8,  # noqa: PLR2004 (32 scores a thread)
        stages=4,
    )


def _choose_rank_block(rank: int, most: int) -> int:
    # Little padding, then few steps: where whole rows fit, parts of `up` are contiguous.
    block = max(MIN_DOT, min(most, int(triton.next_power_of_2(rank))))
    blocks = [block]
    while block > LEAST_RANK_BLOCK:
        block //= 2
        blocks.append(block)
    return min(blocks, key=lambda size: (-(-rank // size) * size, -size))
