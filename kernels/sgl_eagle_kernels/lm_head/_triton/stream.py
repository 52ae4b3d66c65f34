"""Stage 1, local, of few rows: the copy engine streams `up` through the chip.

Finds what `local.py` finds. There, threads spend most of their time on addresses and masks of what
they load; here, one instruction fetches a part, and ranking hides behind the fetches.
"""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
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
from sgl_eagle_kernels.lm_head._triton.lanes import (
    MOST_KEPT,
    see_nothing,
    see_part,
    sum_rest,
    take_best,
)
from sgl_eagle_kernels.lm_head._triton.order import await_inputs
from sgl_eagle_kernels.lm_head._triton.prefetch import prefetch
from sgl_eagle_kernels.lm_head._triton.tiles import load_inputs
from sgl_eagle_kernels.lm_head.head import LocalTop, TwoStageHead

MOST_ROWS = BLOCK_ROWS = 8
MOST_RANK_BLOCK = 256  # where whole rows fit, parts of `up` are contiguous
ADDRESS_BYTES = 16  # what addresses that the engine is given are multiples of
LEAST_SHARED_BYTES = 200_000
"""Memory on chip without which `local.py` is used: the parts of all programs fill it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """How the work is cut; what is found does not depend on it.

    Attributes:
        tokens: Of a part of `up`, a power of two of at least 16.
        stages: One part is multiplied, the others are on their way.
        programs: On a multiprocessor: some stream while others rank a tile.
        warps: Of a program.
    """

    tokens: int = 32
    stages: int = 4
    programs: int = 4
    warps: int = 2

    def shared_bytes(self, rank: int) -> int:
        """What parts take of a multiprocessor's memory.

        Args:
            rank: R.

        Returns:
            Bytes, in half precision.
        """
        return self.programs * (self.stages - 1) * self.tokens * choose_rank_block(rank) * 4


PLAN = StreamPlan()
"""The fastest of `python -m sgl_eagle_kernels.bench --plans` on an H200."""


def choose_rank_block(rank: int) -> int:
    """Part of the rank that one of two products multiplies.

    Args:
        rank: R.

    Returns:
        A power of two, at least 16.
    """
    return min(max(32, int(triton.next_power_of_2(rank))), MOST_RANK_BLOCK) // 2


@triton.jit
def _find_tokens(tile, in_tile, ids_ptr, num_tokens, TILE: tl.constexpr, HAS_IDS: tl.constexpr):
    # Tokens of some places of a tile of the vocabulary, which may be shuffled, and which there are.
    places = tile * TILE + in_tile
    inside = (in_tile < TILE) & (places < num_tokens)
    if HAS_IDS:
        return tl.load(ids_ptr + places, mask=inside, other=0).to(tl.int32), inside
    return places, inside


@triton.jit
def _hint_at_ids(
    ids_ptr,
    walker,
    num_walkers,
    num_turns,
    num_tokens,
    TILE: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HINTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Of all tiles of a program, while its input is still computed.
    if HAS_IDS:
        for turn in range(num_turns):
            first = (walker + turn * num_walkers) * TILE
            prefetch(ids_ptr, first, TILE, num_tokens, HINTS, OVERLAP)


@triton.jit
def _load_halves(x_ptr, rows, k, num_rows, stride_x_row, RANK: tl.constexpr, BLOCK_K: tl.constexpr):
    # Two parts of the low-rank inputs that follow each other.
    lane = k + tl.arange(0, BLOCK_K)
    x = load_inputs(x_ptr, rows, lane, num_rows, stride_x_row, RANK)
    return x, load_inputs(x_ptr, rows, lane + BLOCK_K, num_rows, stride_x_row, RANK)


@triton.jit
def _choose_tokens(
    best,
    best_token,
    second,
    second_token,
    tile,
    rows,
    num_rows,
    num_tiles,
    candidates_ptr,
    scores_ptr,
    PER_TILE: tl.constexpr,
):
    # The best tokens of a tile are stored, -1 where there is none; the memory without them remains.
    for pick in tl.static_range(PER_TILE):
        value, token, best, best_token, second = take_best(
            best, best_token, second, second_token, 0, PER_TILE
        )
        found = tl.where(value > float("-inf"), token, -1)
        at = (rows.to(tl.int64) * num_tiles + tile) * PER_TILE + pick
        tl.store(candidates_ptr + at, found.to(tl.int64), mask=rows < num_rows)
        tl.store(scores_ptr + at, value, mask=rows < num_rows)
    return best, second


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_tiles"])
def stream_tiles_kernel(
    up_desc,
    x_ptr,
    ids_ptr,
    candidates_ptr,
    scores_ptr,
    mass_ptr,
    num_rows,
    num_tokens,
    num_tiles,
    stride_x_row,
    HAS_IDS: tl.constexpr,
    TILE: tl.constexpr,
    PER_TILE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HINTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The best one or two tokens of every tile for each row, and the log mass of the rest.

    The rank is multiplied in two halves at a time, so that one product need not wait for the other.
    """
    walker, num_walkers = tl.program_id(0), tl.num_programs(0)
    num_turns = (num_tiles - walker + num_walkers - 1) // num_walkers
    rows, lane = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_V)
    k_steps: tl.constexpr = (RANK + 2 * BLOCK_K - 1) // (2 * BLOCK_K)
    parts: tl.constexpr = (TILE + BLOCK_V - 1) // BLOCK_V
    tile_steps: tl.constexpr = parts * k_steps
    _hint_at_ids(ids_ptr, walker, num_walkers, num_turns, num_tokens, TILE, HAS_IDS, HINTS, OVERLAP)
    x = tl.zeros((BLOCK_N, BLOCK_K), x_ptr.dtype.element_ty)
    other_x, nothing = x, tl.zeros((BLOCK_V, BLOCK_N), tl.float32)
    scores, other = nothing, nothing
    best, best_token, second, second_token, beyond, rest = see_nothing(BLOCK_V, BLOCK_N)
    if k_steps > 1:
        await_inputs(OVERLAP)
    for step in range(num_turns * tile_steps):
        part, k = step // k_steps % parts, step % k_steps * 2 * BLOCK_K
        tile = walker + step // tile_steps * num_walkers
        tokens, inside = _find_tokens(
            tile, part * BLOCK_V + lane, ids_ptr, num_tokens, TILE, HAS_IDS
        )
        if k_steps > 1:
            x, other_x = _load_halves(x_ptr, rows, k, num_rows, stride_x_row, RANK, BLOCK_K)
        elif step == 0:
            # Waited for inside the loop, before which the engine is told of the first parts: they
            # are on their way while the input is still computed.
            await_inputs(OVERLAP)
            x, other_x = _load_halves(x_ptr, rows, 0, num_rows, stride_x_row, RANK, BLOCK_K)
        first = tile * TILE + part * BLOCK_V
        up, other_up = up_desc.load([first, k]), up_desc.load([first, k + BLOCK_K])
        scores = tl.dot(up, tl.trans(x), acc=scores)
        other = tl.dot(other_up, tl.trans(other_x), acc=other)
        if step % k_steps == k_steps - 1:
            # A plain sum would be compiled to one product after the other.
            best, best_token, second, second_token, beyond, rest = see_part(
                scores - (-other), inside[:, None], tokens[:, None],
                best, best_token, second, second_token, beyond, rest, PER_TILE,
            )  # fmt: skip
            scores, other = nothing, nothing
        if step % tile_steps == tile_steps - 1:
            best, second = _choose_tokens(
                best, best_token, second, second_token, tile, rows, num_rows, num_tiles,
                candidates_ptr, scores_ptr, PER_TILE,
            )  # fmt: skip
            mass = sum_rest(best, second, beyond, rest, 0)
            at = rows.to(tl.int64) * num_tiles + tile
            tl.store(mass_ptr + at, mass, mask=rows < num_rows)
            best, best_token, second, second_token, beyond, rest = see_nothing(BLOCK_V, BLOCK_N)


class StreamedTiles(NamedTuple):
    """What is found in T tiles.

    Attributes:
        ids: [N, C] int64, -1 for padding.
        scores: [N, C] float32 low-rank scores of theirs, minus infinity for padding.
        mass: [N, T] float32 log mass dropped in each tile.
    """

    ids: Tensor
    scores: Tensor
    mass: Tensor


def can_stream(x: Tensor, head: TwoStageHead) -> bool:
    """Whether `stream_tiles` can take some rows.

    Args:
        x: [N, R] contiguous low-rank inputs.
        head: Weights.

    Returns:
        True for few rows that keep one or two tokens of a tile, in half precision, where the engine
        can address the rows of `up`.
    """
    shortlist = head.shortlist
    up = head.up
    return (
        copies_tensors(x.device)
        and shared_memory_bytes(x.device) >= LEAST_SHARED_BYTES
        and isinstance(shortlist, LocalTop)
        and shortlist.per_tile <= MOST_KEPT
        and shortlist.tile_size > PLAN.tokens // 2
        and len(x) <= MOST_ROWS
        and up.dtype in {torch.bfloat16, torch.float16}
        and up.stride(0) * up.element_size() % ADDRESS_BYTES == 0
        and up.data_ptr() % ADDRESS_BYTES == 0
    )


def stream_tiles(x: Tensor, head: TwoStageHead, plan: StreamPlan | None = None) -> StreamedTiles:
    """The best tokens of every tile.

    Args:
        x: [N, R] contiguous low-rank inputs, for which `can_stream` holds.
        head: Weights.
        plan: How the work is cut; None takes `PLAN`.

    Returns:
        What is found.
    """
    plan = plan or PLAN
    assert isinstance(head.shortlist, LocalTop)
    num_rows, rank = x.shape
    tile, per_tile = head.shortlist.tile_size, head.shortlist.per_tile
    num_tiles = triton.cdiv(head.num_tokens, tile)
    device = x.device
    count = num_tiles * per_tile
    found = StreamedTiles(
        ids=torch.empty(num_rows, count, dtype=torch.int64, device=device),
        scores=torch.empty(num_rows, count, dtype=torch.float32, device=device),
        mass=torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device),
    )
    block_k = choose_rank_block(rank)
    stream_tiles_kernel[count_walkers(num_tiles, plan, device),](
        TensorDescriptor.from_tensor(head.up, [plan.tokens, block_k]),
        x, head.ids, *found,
        num_rows, head.num_tokens, num_tiles, x.stride(0),
        HAS_IDS=head.ids is not None,
        TILE=tile,
        PER_TILE=per_tile,
        RANK=rank,
        BLOCK_V=plan.tokens,
        BLOCK_K=block_k,
        BLOCK_N=BLOCK_ROWS,
        HINTS=32 * plan.warps,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **launch_options(device),
    )  # fmt: skip
    return found


def count_walkers(num_tiles: int, plan: StreamPlan, device: torch.device) -> int:
    """Programs that share the tiles.

    Args:
        num_tiles: T.
        plan: How the work is cut.
        device: Of the tensors.

    Returns:
        At most one for each tile.
    """
    return min(num_tiles, plan.programs * count_multiprocessors(device))
