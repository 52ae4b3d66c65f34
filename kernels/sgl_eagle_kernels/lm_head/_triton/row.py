"""Stage 1, local, of one row with its exact logits: the copy engine streams `up` through the chip.

Finds what `stream.py` finds of one row. There, lanes remember the best of what they have seen of
each row; here, all scores of a tile stay on chip, one column of lanes for each part, so that a part
costs little more than its product and a tile is ranked once, at its end.
"""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sgl_eagle_kernels.launch import launch_options
from sgl_eagle_kernels.lm_head._triton.order import await_inputs, id_of, key_of, log_mass, score_of
from sgl_eagle_kernels.lm_head._triton.stream import (
    PLAN,
    StreamPlan,
    can_stream,
    choose_rank_block,
    count_walkers,
)
from sgl_eagle_kernels.lm_head.head import LocalTop, TwoStageHead

GATHERED_ELEMENTS = 8192  # of the full head, that one program has under way
COLUMNS = 8  # of a product of tensor cores
REGISTERS, MOST_REGISTERS = 51_200, 255
"""Of a multiprocessor, for all programs, and of a thread. The others are for the next kernel, whose
programs start while these run; with fewer, two tokens of a tile would spill."""


@triton.jit
def _load_halves(x_ptr, k, RANK: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr):
    # Two parts of the low-rank input that follow each other, the same in every column.
    lane = k + tl.arange(0, BLOCK_K)
    same = x_ptr + tl.zeros((COLUMNS,), tl.int32)[:, None]
    x = tl.load(same + lane[None, :], mask=(lane < RANK)[None, :], other=0.0)
    lane += BLOCK_K
    return x, tl.load(same + lane[None, :], mask=(lane < RANK)[None, :], other=0.0)


@triton.jit
def _flatten(lanes):
    # One reduction of all lanes is quicker than one of each axis.
    return tl.reshape(lanes, (lanes.numel,))


@triton.jit
def _key_scores(scores, ids, inside):
    # Keys of the tokens of a tile; padding comes after all of them.
    return tl.where(inside, key_of(scores, ids), -0x8000000000000000)


@triton.jit
def _finish_tile(
    scores,
    ids,
    inside,
    tile,
    head_input_ptr,
    weight_ptr,
    candidates_ptr,
    scores_ptr,
    mass_ptr,
    logits_ptr,
    stride_weight_row,
    PER_TILE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    # The best tokens of a tile with their exact logits, -1 where there is none, and the log mass of
    # all others.
    slot, h = tl.arange(0, PER_TILE), tl.arange(0, BLOCK_H)
    chosen = tl.full((PER_TILE,), -1, tl.int64)
    values = tl.full((PER_TILE,), float("-inf"), tl.float32)
    keys = _key_scores(scores, ids, inside)
    rest = inside
    for pick in tl.static_range(PER_TILE):
        key = tl.max(_flatten(keys), axis=0)
        value = score_of((key >> 32).to(tl.int32))
        found = value > float("-inf")
        chosen = tl.where(slot == pick, tl.where(found, id_of(key), -1), chosen)
        values = tl.where(slot == pick, tl.where(found, value, float("-inf")), values)
        rest = rest & (keys != key)
        keys = tl.where(rest, keys, -0x8000000000000000)
    real = chosen >= 0
    # 64-bit: a large head has more than 2^31 elements.
    weights = weight_ptr + tl.where(real, chosen, 0)[:, None] * stride_weight_row
    # On their way while the mass is summed.
    w = tl.load(weights + h[None, :], mask=real[:, None] & (h < HIDDEN)[None, :], other=0.0)
    x = tl.load(head_input_ptr + h, mask=h < HIDDEN, other=0.0)
    # What is not a number wins no place, but has to reach the mass.
    broken = inside & ((scores != scores) | (scores == float("inf")))
    dropped = tl.where(broken, float("nan"), tl.where(rest, scores, float("-inf")))
    tl.store(mass_ptr + tile, log_mass(_flatten(dropped), 0))
    at = tile * PER_TILE + slot
    tl.store(candidates_ptr + at, chosen)
    tl.store(scores_ptr + at, values)
    total = tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    for start in tl.static_range(BLOCK_H, HIDDEN, BLOCK_H):
        inside_row = start + h < HIDDEN
        mask = real[:, None] & inside_row[None, :]
        w = tl.load(weights + start + h[None, :], mask=mask, other=0.0)
        x = tl.load(head_input_ptr + start + h, mask=inside_row, other=0.0)
        total += tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    tl.store(logits_ptr + at, tl.where(real, total, float("-inf")))


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def stream_row_kernel(
    up_desc,
    x_ptr,
    ids_ptr,
    head_input_ptr,
    weight_ptr,
    candidates_ptr,
    scores_ptr,
    mass_ptr,
    logits_ptr,
    num_tokens,
    num_tiles,
    stride_weight_row,
    HAS_IDS: tl.constexpr,
    TILE: tl.constexpr,
    PER_TILE: tl.constexpr,
    RANK: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The best one or two tokens of every tile, their exact logits, and the log mass of the rest.

    The input stands in every column of a product, so that each column has the scores of the part;
    the part keeps those of its own. The rank is multiplied in two halves at a time, so that one
    product need not wait for the other.
    """
    walker, num_walkers = tl.program_id(0), tl.num_programs(0)
    k_steps: tl.constexpr = (RANK + 2 * BLOCK_K - 1) // (2 * BLOCK_K)
    parts: tl.constexpr = (TILE + BLOCK_V - 1) // BLOCK_V
    tile_steps: tl.constexpr = parts * k_steps
    column = tl.arange(0, COLUMNS)[None, :]
    in_tile = column * BLOCK_V + tl.arange(0, BLOCK_V)[:, None]
    nothing = tl.zeros((BLOCK_V, COLUMNS), tl.float32)
    product, other, scores, ids = nothing, nothing, nothing, nothing.to(tl.int32)
    x = tl.zeros((COLUMNS, BLOCK_K), x_ptr.dtype.element_ty)
    other_x = x
    num_turns = (num_tiles - walker + num_walkers - 1) // num_walkers
    if k_steps > 1:
        await_inputs(OVERLAP)
    for step in range(num_turns * tile_steps):
        in_turn = step % tile_steps
        part, k = in_turn // k_steps, in_turn % k_steps * 2 * BLOCK_K
        tile = walker + step // tile_steps * num_walkers
        places = tile * TILE + in_tile
        inside = (in_tile < TILE) & (places < num_tokens)
        if k_steps > 1:
            x, other_x = _load_halves(x_ptr, k, RANK, BLOCK_K, COLUMNS)
        elif step == 0:
            # Waited for inside the loop, before which the engine is told of the first parts: they
            # are on their way while the input is still computed.
            await_inputs(OVERLAP)
            x, other_x = _load_halves(x_ptr, 0, RANK, BLOCK_K, COLUMNS)
        if in_turn == parts // 2 * k_steps:
            # Neither while the first parts are on their way nor when the last is there.
            ids = places
            if HAS_IDS:
                ids = tl.load(ids_ptr + places, mask=inside, other=0).to(tl.int32)
        first = tile * TILE + part * BLOCK_V
        up, other_up = up_desc.load([first, k]), up_desc.load([first, k + BLOCK_K])
        product = tl.dot(up, tl.trans(x), acc=product)
        other = tl.dot(other_up, tl.trans(other_x), acc=other)
        if step % k_steps == k_steps - 1:
            # A plain sum would be compiled to one product after the other.
            scores = tl.where(column == part, product - (-other), scores)
            product, other = nothing, nothing
        if in_turn == tile_steps - 1:
            _finish_tile(
                scores, ids, inside, tile, head_input_ptr, weight_ptr,
                candidates_ptr, scores_ptr, mass_ptr, logits_ptr, stride_weight_row,
                PER_TILE, HIDDEN, BLOCK_H,
            )  # fmt: skip


class StreamedRow(NamedTuple):
    """What is found in T tiles for one row.

    Attributes:
        ids: [1, C] int64, -1 for padding.
        scores: [1, C] float32 low-rank scores of theirs, minus infinity for padding.
        mass: [1, T] float32 log mass dropped in each tile.
        logits: [1, C] float32 exact logits, minus infinity for padding.
    """

    ids: Tensor
    scores: Tensor
    mass: Tensor
    logits: Tensor


def can_stream_row(x: Tensor, head: TwoStageHead, plan: StreamPlan | None = None) -> bool:
    """Whether `stream_row` can take some rows.

    Args:
        x: [N, R] contiguous low-rank inputs.
        head: Weights.
        plan: How the work is cut; None takes `PLAN`.

    Returns:
        True for one row that `stream_tiles` could take, where the scores of a tile fit on chip.
    """
    if len(x) > 1 or not can_stream(x, head):
        return False
    plan = plan or PLAN
    assert isinstance(head.shortlist, LocalTop)
    return head.shortlist.tile_size <= COLUMNS * plan.tokens * plan.programs


def fit_plan(plan: StreamPlan, tile_size: int) -> StreamPlan:
    """A plan by which no tile has more parts than there are columns.

    Args:
        plan: For smaller tiles.
        tile_size: Tokens of a tile.

    Returns:
        Fewer programs of larger parts, so that as much of `up` is under way.
    """
    while tile_size > COLUMNS * plan.tokens:
        plan = replace(
            plan,
            tokens=2 * plan.tokens,
            warps=2 * plan.warps,
            programs=max(1, plan.programs // 2),
        )
    return plan


def stream_row(
    x: Tensor, head: TwoStageHead, head_input: Tensor, plan: StreamPlan | None = None
) -> StreamedRow:
    """The best tokens of every tile with their exact logits.

    Args:
        x: [1, R] contiguous low-rank input, for which `can_stream_row` holds.
        head: Weights.
        head_input: [1, H] contiguous.
        plan: How the work is cut; None takes `PLAN`.

    Returns:
        What is found.
    """
    assert isinstance(head.shortlist, LocalTop)
    plan = fit_plan(plan or PLAN, head.shortlist.tile_size)
    rank, hidden, device = x.shape[1], head.weight.shape[1], x.device
    tile, per_tile = head.shortlist.tile_size, head.shortlist.per_tile
    num_tiles = triton.cdiv(head.num_tokens, tile)
    count = num_tiles * per_tile
    found = StreamedRow(
        ids=torch.empty(1, count, dtype=torch.int64, device=device),
        scores=torch.empty(1, count, dtype=torch.float32, device=device),
        mass=torch.empty(1, num_tiles, dtype=torch.float32, device=device),
        logits=torch.empty(1, count, dtype=torch.float32, device=device),
    )
    walkers = count_walkers(num_tiles, plan, device)
    block_k = choose_rank_block(rank)
    stream_row_kernel[walkers,](
        TensorDescriptor.from_tensor(head.up, [plan.tokens, block_k]),
        x, head.ids, head_input, head.weight, *found,
        head.num_tokens, num_tiles, head.weight.stride(0),
        HAS_IDS=head.ids is not None,
        TILE=tile,
        PER_TILE=per_tile,
        RANK=rank,
        HIDDEN=hidden,
        BLOCK_V=plan.tokens,
        BLOCK_K=block_k,
        COLUMNS=COLUMNS,
        BLOCK_H=min(triton.next_power_of_2(hidden), GATHERED_ELEMENTS // per_tile),
        num_warps=plan.warps,
        num_stages=plan.stages,
        maxnreg=min(MOST_REGISTERS, REGISTERS // (32 * plan.warps * plan.programs)),
        **launch_options(device),
    )  # fmt: skip
    return found
