"""Stage 1, local, of few rows: the copy engine streams `up` through the chip.

The best token of every tile, as in `local.py`, and its exact logit. Few threads serve much memory:
the engine fetches what comes next while a tile is ranked and while the row of the full head that
it chose is on its way.
"""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sgl_eagle_kernels.launch import (
    copies_tensors,
    count_multiprocessors,
    launch_options,
    shared_memory_bytes,
)
from sgl_eagle_kernels.lm_head._triton.order import await_inputs, log_mass
from sgl_eagle_kernels.lm_head._triton.prefetch import prefetch
from sgl_eagle_kernels.lm_head._triton.tiles import load_inputs
from sgl_eagle_kernels.lm_head.head import LocalTop, TwoStageHead

MOST_ROWS = BLOCK_ROWS = 8
BLOCK_TOKENS = 64
MOST_RANK_BLOCK = 256  # where whole rows fit, parts of `up` are contiguous
NUM_STAGES = 4  # one part is multiplied, the others are on their way
PROGRAMS = 2  # on a multiprocessor: one streams while the other ranks a tile
NUM_WARPS = 4
MOST_GATHERED = 8  # tiles of one program
GATHERED_ELEMENTS = 16384  # of the full head, that one program has under way
HINTED_PARTS = 0  # of a program's first tile, before its inputs are known
ADDRESS_BYTES = 16  # what addresses that the engine is given are multiples of
SHARED_BYTES = PROGRAMS * NUM_STAGES * BLOCK_TOKENS * MOST_RANK_BLOCK * 2 * 3 // 4


@triton.jit
def _exact_logits(
    head_input_ptr,
    weight_ptr,
    tokens,
    stride_weight_row,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    # Products of one input with some rows of the full head; minus infinity for those of -1.
    real = tokens >= 0
    # 64-bit: a large head has more than 2^31 elements.
    weights = weight_ptr + tl.where(real, tokens, 0).to(tl.int64)[:, None] * stride_weight_row
    total = tl.zeros(tokens.shape, tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        mask = real[:, None] & (h < HIDDEN)[None, :]
        w = tl.load(weights + h[None, :], mask=mask, other=0.0)
        x = tl.load(head_input_ptr + h, mask=h < HIDDEN, other=0.0)
        total += tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    return tl.where(real, total, float("-inf"))


@triton.jit
def _see_nothing(BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr):
    nothing = tl.zeros((BLOCK_V, BLOCK_N), tl.float32)
    return nothing - float("inf"), nothing.to(tl.int32), nothing - float("inf"), nothing


@triton.jit
def _see_part(scores, inside, part, best, best_part, second, rest):
    # Of each lane: the best score so far, the part it came from, the second best, and the mass of
    # all but the best relative to the second: relative to the best it might underflow.
    broken = inside & ((scores != scores) | (scores == float("inf")))
    scores = tl.where(inside & (scores == scores), scores, float("-inf"))
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
    value = tl.max(best, axis=0)
    place = tl.min(tl.where(best == value[None, :], places, 0x7FFFFFFF), axis=0)
    other = tl.where(places == place[None, :], float("-inf"), best)
    shift = tl.max(tl.maximum(other, second), axis=0)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    lane_mass = tl.exp(other - shift[None, :]) + tl.exp(second - shift[None, :]) * rest
    total = tl.sum(lane_mass, axis=0)
    # The interpreter warns of the logarithm of zero.
    mass = shift + tl.log(tl.where(total == 0.0, 1.0, total))
    return value, place, tl.where(total == 0.0, float("-inf"), mass)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_tiles"])
def stream_tiles_kernel(
    up_desc,
    x_ptr,
    up_ptr,
    ids_ptr,
    head_input_ptr,
    weight_ptr,
    candidates_ptr,
    mass_ptr,
    logits_ptr,
    num_rows,
    num_tokens,
    num_tiles,
    stride_x_row,
    stride_weight_row,
    HAS_IDS: tl.constexpr,
    GATHERS: tl.constexpr,
    TILE: tl.constexpr,
    RANK: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HINTED: tl.constexpr,
    HINTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The best token of every tile for each row, and the log mass of the rest of the tile.

    With GATHERS, which is for one row, also the exact logits of what the program has chosen in its
    tiles, BLOCK_T at most; other programs still stream meanwhile.
    """
    walker = tl.program_id(0)
    num_walkers = tl.num_programs(0)
    rows = tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_V)
    k_steps: tl.constexpr = (RANK + BLOCK_K - 1) // BLOCK_K
    parts: tl.constexpr = (TILE + BLOCK_V - 1) // BLOCK_V
    whole_k = tl.arange(0, BLOCK_K)
    slot = tl.arange(0, BLOCK_T)
    chosen_of_tile = tl.full((BLOCK_T,), -1, tl.int32)
    at = walker.to(tl.int64) * TILE * RANK
    prefetch(up_ptr, at, HINTED, num_tokens.to(tl.int64) * RANK, HINTS, OVERLAP)
    await_inputs(OVERLAP)
    # Without steps over the rank it is loaded once.
    whole_x = load_inputs(x_ptr, rows, whole_k, num_rows, stride_x_row, RANK)
    scores = tl.zeros((BLOCK_V, BLOCK_N), tl.float32)
    best, best_part, second, rest = _see_nothing(BLOCK_V, BLOCK_N)
    for step in range((num_tiles - walker + num_walkers - 1) // num_walkers * (parts * k_steps)):
        turn = step // (parts * k_steps)
        tile = walker + turn * num_walkers
        part = step // k_steps % parts
        k = step % k_steps * BLOCK_K
        if HAS_IDS:
            if step % (parts * k_steps) == 0:
                prefetch(ids_ptr, tile * TILE, TILE, num_tokens, HINTS, OVERLAP)
        up = up_desc.load([tile * TILE + part * BLOCK_V, k])
        if k_steps > 1:
            x = load_inputs(x_ptr, rows, k + whole_k, num_rows, stride_x_row, RANK)
        else:
            x = whole_x
        scores = tl.dot(up, tl.trans(x), acc=scores, input_precision="ieee")
        if step % k_steps == k_steps - 1:
            place = part * BLOCK_V + lane
            inside = (place < TILE) & (tile * TILE + place < num_tokens)
            best, best_part, second, rest = _see_part(
                scores, inside[:, None], part, best, best_part, second, rest
            )
            scores = tl.zeros((BLOCK_V, BLOCK_N), tl.float32)
        if step % (parts * k_steps) == parts * k_steps - 1:
            places = best_part * BLOCK_V + lane[:, None]
            value, place, mass = _close_tile(best, places, second, rest)
            best, best_part, second, rest = _see_nothing(BLOCK_V, BLOCK_N)
            real = value > float("-inf")
            row_mask = rows < num_rows
            at_tile = rows.to(tl.int64) * num_tiles + tile
            tl.store(mass_ptr + at_tile, mass, mask=row_mask)
            token = tl.where(real, tile * TILE + place, -1)
            if GATHERS:
                only = tl.sum(tl.where(rows == 0, token, 0), axis=0)
                chosen_of_tile = tl.where(slot == turn, only, chosen_of_tile)
            else:
                if HAS_IDS:
                    token = tl.load(ids_ptr + token, mask=row_mask & real, other=-1)
                tl.store(candidates_ptr + at_tile, token.to(tl.int64), mask=row_mask)
    if GATHERS:
        tokens = chosen_of_tile.to(tl.int64)
        if HAS_IDS:
            tokens = tl.load(ids_ptr + tokens, mask=tokens >= 0, other=-1)
        tile = walker + slot * num_walkers
        tl.store(candidates_ptr + tile, tokens, mask=tile < num_tiles)
        logits = _exact_logits(
            head_input_ptr, weight_ptr, tokens, stride_weight_row, HIDDEN, BLOCK_H
        )
        tl.store(logits_ptr + tile, logits, mask=tile < num_tiles)


class StreamedTiles(NamedTuple):
    """What is found in tiles.

    Attributes:
        ids: [N, T] int64, -1 for padding.
        mass: [N, T] float32 log mass dropped in each tile.
        logits: [N, T] float32 exact logits, minus infinity for padding; None where stage 2 has to
            compute them.
    """

    ids: Tensor
    mass: Tensor
    logits: Tensor | None


def can_stream(x: Tensor, head: TwoStageHead) -> bool:
    """Whether `stream_tiles` can take some rows.

    Args:
        x: [N, R] contiguous low-rank inputs.
        head: Weights.

    Returns:
        True for few rows that keep one token of a tile that fits on chip, in half precision, where
        the engine can address the rows of `up`.
    """
    shortlist = head.shortlist
    up = head.up
    return (
        copies_tensors(x.device)
        and shared_memory_bytes(x.device) >= SHARED_BYTES
        and isinstance(shortlist, LocalTop)
        and shortlist.per_tile == 1
        and shortlist.tile_size > BLOCK_TOKENS // 2
        and len(x) <= MOST_ROWS
        and up.dtype in {torch.bfloat16, torch.float16}
        and up.stride(0) * up.element_size() % ADDRESS_BYTES == 0
        and up.data_ptr() % ADDRESS_BYTES == 0
    )


def stream_tiles(x: Tensor, head: TwoStageHead, head_input: Tensor) -> StreamedTiles:
    """The best token of every tile, and of one row its exact logit, in one launch.

    Args:
        x: [N, R] contiguous low-rank inputs, for which `can_stream` holds.
        head: Weights.
        head_input: [N, H] contiguous.

    Returns:
        What is found.
    """
    assert isinstance(head.shortlist, LocalTop)
    num_rows, rank = x.shape
    tile = head.shortlist.tile_size
    num_tiles = triton.cdiv(head.num_tokens, tile)
    device = x.device
    walkers = min(num_tiles, PROGRAMS * count_multiprocessors(device))
    block_t = int(triton.next_power_of_2(triton.cdiv(num_tiles, walkers)))
    gathers = num_rows == 1 and block_t <= MOST_GATHERED
    found = StreamedTiles(
        ids=torch.empty(num_rows, num_tiles, dtype=torch.int64, device=device),
        mass=torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device),
        logits=torch.empty(1, num_tiles, dtype=torch.float32, device=device) if gathers else None,
    )
    block_k = min(max(16, int(triton.next_power_of_2(rank))), MOST_RANK_BLOCK)
    hidden = head.weight.shape[1]
    stream_tiles_kernel[walkers,](
        TensorDescriptor.from_tensor(head.up, [BLOCK_TOKENS, block_k]),
        x, head.up, head.ids, head_input, head.weight, *found,
        num_rows, head.num_tokens, num_tiles, x.stride(0), head.weight.stride(0),
        HAS_IDS=head.ids is not None,
        GATHERS=gathers,
        TILE=tile,
        RANK=rank,
        HIDDEN=hidden,
        BLOCK_V=BLOCK_TOKENS,
        BLOCK_K=block_k,
        BLOCK_N=BLOCK_ROWS,
        BLOCK_T=block_t,
        BLOCK_H=min(int(triton.next_power_of_2(hidden)), GATHERED_ELEMENTS // block_t),
        HINTED=HINTED_PARTS * BLOCK_TOKENS * rank,
        HINTS=32 * NUM_WARPS,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        **launch_options(device),
    )  # fmt: skip
    return found
