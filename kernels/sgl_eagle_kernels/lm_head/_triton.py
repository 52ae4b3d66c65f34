"""Triton kernels of the two-stage head.

Stage 1 reads `up` once. The local kernel keeps every tile's scores on chip: it writes the ids of
the tile's best and the log mass of the rest. Stage 2 gathers the candidates' rows of the full head;
the last kernel, one program a row, ranks and normalises. Keys are those of `order.py`.
"""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from sgl_eagle_kernels.lm_head.head import GlobalTop, HeadTopk, LocalTop, TwoStageHead
from sgl_eagle_kernels.lm_head.order import key_ids, key_scores

MIN_DOT = 16  # smallest side of a matrix product on tensor cores
GLOBAL_TILE = 128
BLOCK_C = 16


@triton.jit
def _key_of(score, ids):
    # NaN ranks with minus infinity; adding zero turns -0.0 into 0.0.
    score = tl.where(score == score, score, float("-inf")) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def _score_of(key):
    ordered = (key >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _id_of(key):
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def _log_mass(scores, axis: tl.constexpr):
    # Log-sum-exp that is minus infinity for no mass at all, and NaN or infinite where a score is.
    best = tl.max(tl.where(scores == scores, scores, float("-inf")), axis=axis)
    shift = tl.where(best == float("-inf"), 0.0, best)
    if axis == 0:
        total = tl.sum(tl.exp(scores - shift), axis=0)
    else:
        total = tl.sum(tl.exp(scores - shift[:, None]), axis=1)
    # The interpreter warns of the logarithm of zero.
    return tl.where(total == 0.0, float("-inf"), shift + tl.log(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def _score_tile(
    x_ptr,
    up_ptr,
    rows,
    tokens,
    num_rows,
    num_tokens,
    stride_x_row,
    stride_up_row,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    scores = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start in range(0, RANK, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + rows.to(tl.int64)[:, None] * stride_x_row + k[None, :],
            mask=(rows < num_rows)[:, None] & (k < RANK)[None, :],
            other=0.0,
        )
        up = tl.load(
            up_ptr + tokens.to(tl.int64)[None, :] * stride_up_row + k[:, None],
            mask=(tokens < num_tokens)[None, :] & (k < RANK)[:, None],
            other=0.0,
        )
        # Full float32 products where the weights are float32: no-op for half precision.
        scores = tl.dot(x, up, acc=scores, input_precision="ieee")
    return scores


@triton.jit
def local_top_kernel(
    x_ptr,
    up_ptr,
    ids_ptr,
    candidates_ptr,
    mass_ptr,
    num_rows,
    num_tokens,
    stride_x_row,
    stride_up_row,
    stride_candidates_row,
    stride_mass_row,
    HAS_IDS: tl.constexpr,
    TILE: tl.constexpr,
    PER_TILE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Best tokens of one tile for some rows: scores never leave the chip."""
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_V)
    tokens = tile * TILE + lane
    inside = (lane < TILE) & (tokens < num_tokens)
    scores = _score_tile(
        x_ptr, up_ptr, rows, tl.where(inside, tokens, num_tokens), num_rows, num_tokens,
        stride_x_row, stride_up_row, RANK, BLOCK_K, BLOCK_N, BLOCK_V,
    )  # fmt: skip
    scores = tl.where(inside[None, :], scores, float("-inf"))
    # Lanes of a tile ascend with token ids, so the lane settles ties.
    keys = _key_of(scores, tl.broadcast_to(lane[None, :], (BLOCK_N, BLOCK_V)))
    row_mask = rows < num_rows
    rows64 = rows.to(tl.int64)
    broken = tl.zeros((BLOCK_N,), tl.int32)
    for rank in tl.static_range(PER_TILE):
        best = tl.max(keys, axis=1)
        place = _id_of(best)
        value = _score_of(best)
        token = tile * TILE + place
        real = (value > float("-inf")) & (token < num_tokens)
        if HAS_IDS:
            token = tl.load(ids_ptr + token, mask=row_mask & real, other=0)
        tl.store(
            candidates_ptr + rows64 * stride_candidates_row + tile * PER_TILE + rank,
            tl.where(real, token, -1),
            mask=row_mask,
        )
        broken = broken | (value == float("inf")).to(tl.int32)
        chosen = lane.to(tl.int64)[None, :] == place[:, None]
        scores = tl.where(chosen & real[:, None], float("-inf"), scores)
        keys = tl.where(chosen, -0x8000000000000000, keys)
    mass = tl.where(broken != 0, float("nan"), _log_mass(scores, 1))
    tl.store(mass_ptr + rows64 * stride_mass_row + tile, mass, mask=row_mask)


@triton.jit
def score_keys_kernel(
    x_ptr,
    up_ptr,
    keys_ptr,
    mass_ptr,
    num_rows,
    num_tokens,
    stride_x_row,
    stride_up_row,
    stride_keys_row,
    stride_mass_row,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Keys of all scores; as log mass of each tile NaN if a score is not a number, else nothing."""
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    scores = _score_tile(
        x_ptr, up_ptr, rows, tokens, num_rows, num_tokens,
        stride_x_row, stride_up_row, RANK, BLOCK_K, BLOCK_N, BLOCK_V,
    )  # fmt: skip
    scores = tl.where((tokens < num_tokens)[None, :], scores, float("-inf"))
    keys = _key_of(scores, tl.broadcast_to(tokens[None, :], (BLOCK_N, BLOCK_V)))
    rows64 = rows.to(tl.int64)
    mask = (rows < num_rows)[:, None] & (tokens < num_tokens)[None, :]
    tl.store(keys_ptr + rows64[:, None] * stride_keys_row + tokens[None, :], keys, mask=mask)
    # Keys cannot tell NaN, and plus infinity would be taken for a candidate like any other.
    bad = (scores != scores) | (scores == float("inf"))
    broken = tl.max(bad.to(tl.int32), axis=1)
    tl.store(
        mass_ptr + rows64 * stride_mass_row + tile,
        tl.where(broken != 0, float("nan"), float("-inf")),
        mask=rows < num_rows,
    )


@triton.jit
def dropped_mass_kernel(
    keys_ptr,
    lowest_ptr,
    mass_ptr,
    num_rows,
    num_tokens,
    stride_keys_row,
    stride_mass_row,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Log mass of the tokens of one tile whose keys lie below those of the candidates.

    Taking the candidates' mass from the mass of all would cancel: their exact logits may be far
    lower than their low-rank scores.
    """
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < num_rows
    rows64 = rows.to(tl.int64)
    tokens = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = row_mask[:, None] & (tokens < num_tokens)[None, :]
    at_keys = keys_ptr + rows64[:, None] * stride_keys_row + tokens[None, :]
    keys = tl.load(at_keys, mask=mask, other=0)
    lowest = tl.load(lowest_ptr + rows64, mask=row_mask, other=0)
    scores = tl.where(mask & (keys < lowest[:, None]), _score_of(keys), float("-inf"))
    at = mass_ptr + rows64 * stride_mass_row + tile
    before = tl.load(at, mask=row_mask, other=float("-inf"))
    tl.store(at, tl.where(before == before, _log_mass(scores, 1), before), mask=row_mask)


@triton.jit
def gather_dot_kernel(
    x_ptr,
    weight_ptr,
    candidates_ptr,
    logits_ptr,
    num_candidates,
    stride_x_row,
    stride_weight_row,
    stride_candidates_row,
    stride_logits_row,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Exact logits of one row's candidates: gathered rows of the full head times the input."""
    row = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    listed = lane < num_candidates
    ids = tl.load(candidates_ptr + row * stride_candidates_row + lane, mask=listed, other=-1)
    real = ids >= 0
    # 64-bit: a large head has more than 2^31 elements.
    weight_rows = weight_ptr + tl.where(real, ids, 0).to(tl.int64) * stride_weight_row
    total = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(0, HIDDEN, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        x = tl.load(x_ptr + row * stride_x_row + h, mask=h < HIDDEN, other=0.0).to(tl.float32)
        w = tl.load(
            weight_rows[:, None] + h[None, :],
            mask=real[:, None] & (h < HIDDEN)[None, :],
            other=0.0,
        ).to(tl.float32)
        total += tl.sum(w * x[None, :], axis=1)
    tl.store(
        logits_ptr + row * stride_logits_row + lane,
        tl.where(real, total, float("-inf")),
        mask=listed,
    )


@triton.jit
def rank_candidates_kernel(
    candidates_ptr,
    logits_ptr,
    mass_ptr,
    log_probs_ptr,
    ids_ptr,
    normalizer_ptr,
    finite_ptr,
    num_candidates,
    num_tiles,
    stride_candidates_row,
    stride_mass_row,
    TOPK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Best K of one row, with log-probabilities over the whole vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_C)
    listed = lane < num_candidates
    at = row * stride_candidates_row + lane
    ids = tl.load(candidates_ptr + at, mask=listed, other=-1)
    logits = tl.load(logits_ptr + at, mask=listed, other=float("-inf"))
    tile = tl.arange(0, BLOCK_T)
    mass = tl.load(
        mass_ptr + row * stride_mass_row + tile, mask=tile < num_tiles, other=float("-inf")
    )
    dropped = _log_mass(mass, 0)
    exact = _log_mass(logits, 0)
    # NaN and infinity must reach the flag, so the larger is not found by comparing alone.
    high = tl.where(exact > dropped, exact, dropped)
    low = tl.where(exact > dropped, dropped, exact)
    normalizer = tl.where(low == float("-inf"), high, high + tl.log(1.0 + tl.exp(low - high)))
    finite = (normalizer - normalizer) == 0.0
    tl.store(normalizer_ptr + row, normalizer)
    tl.store(finite_ptr + row, finite)
    keys = tl.where(listed, _key_of(logits, tl.maximum(ids, 0)), -0x8000000000000000)
    for rank in tl.static_range(TOPK):
        best = tl.max(keys, axis=0)
        log_prob = tl.where(finite, _score_of(best) - normalizer, float("-inf"))
        tl.store(log_probs_ptr + row * TOPK + rank, log_prob)
        tl.store(ids_ptr + row * TOPK + rank, tl.where(finite, _id_of(best), rank))
        keys = tl.where(keys == best, -0x8000000000000000, keys)


def two_stage_topk(head_input: Tensor, head: TwoStageHead, topk: int) -> HeadTopk:
    """Both stages in four to six launches, without synchronisation.

    Args:
        head_input: [N, H] contiguous, in the dtype of the weights.
        head: Weights.
        topk: K, at most `head.most_topk`.

    Returns:
        The best K tokens of each row.
    """
    x = functional.linear(head_input, head.down)
    if isinstance(head.shortlist, LocalTop):
        candidates, mass = launch_local(x, head, head.shortlist)
    else:
        candidates, mass = launch_global(x, head, head.shortlist)
    return launch_stage2(head_input, head, candidates, mass, topk)


def launch_local(x: Tensor, head: TwoStageHead, shortlist: LocalTop) -> tuple[Tensor, Tensor]:
    """Stage 1, local.

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
    block_n, block_k = _blocks(num_rows, rank)
    local_top_kernel[num_tiles, triton.cdiv(num_rows, block_n)](
        x, head.up, head.up if head.ids is None else head.ids, candidates, mass,
        num_rows, head.num_tokens,
        x.stride(0), head.up.stride(0), candidates.stride(0), mass.stride(0),
        HAS_IDS=head.ids is not None,
        TILE=shortlist.tile_size,
        PER_TILE=shortlist.per_tile,
        RANK=rank,
        BLOCK_K=block_k,
        BLOCK_N=block_n,
        BLOCK_V=max(MIN_DOT, triton.next_power_of_2(shortlist.tile_size)),
        num_warps=4,
    )  # fmt: skip
    return candidates, mass


def launch_global(x: Tensor, head: TwoStageHead, shortlist: GlobalTop) -> tuple[Tensor, Tensor]:
    """Stage 1, global.

    Args:
        x: [N, R] contiguous low-rank inputs.
        head: Weights.
        shortlist: How many.

    Returns:
        [N, C] int64 candidates, and [N, T] float32 log mass dropped in each tile.
    """
    num_rows, rank = x.shape
    num_tiles = triton.cdiv(head.num_tokens, GLOBAL_TILE)
    keys = torch.empty(num_rows, head.num_tokens, dtype=torch.int64, device=x.device)
    mass = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=x.device)
    block_n, block_k = _blocks(num_rows, rank)
    grid = (num_tiles, triton.cdiv(num_rows, block_n))
    score_keys_kernel[grid](
        x, head.up, keys, mass,
        num_rows, head.num_tokens,
        x.stride(0), head.up.stride(0), keys.stride(0), mass.stride(0),
        RANK=rank,
        BLOCK_K=block_k,
        BLOCK_N=block_n,
        BLOCK_V=GLOBAL_TILE,
        num_warps=4,
    )  # fmt: skip
    # Keys are distinct, so any correct selection is the same selection.
    best = keys.topk(shortlist.count(head.num_tokens), dim=-1, sorted=False).values
    dropped_mass_kernel[grid](
        keys, best.amin(dim=-1), mass, num_rows, head.num_tokens, keys.stride(0), mass.stride(0),
        BLOCK_N=block_n,
        BLOCK_V=GLOBAL_TILE,
        num_warps=4,
    )  # fmt: skip
    ids = key_ids(best)
    return ids.masked_fill_(key_scores(best) == -torch.inf, -1), mass


def launch_stage2(
    head_input: Tensor,
    head: TwoStageHead,
    candidates: Tensor,
    mass: Tensor,
    topk: int,
) -> HeadTopk:
    """Stage 2.

    Args:
        head_input: [N, H] contiguous.
        head: Weights.
        candidates: [N, C] int64 contiguous ids, -1 for padding.
        mass: [N, T] float32 contiguous log masses of what was dropped.
        topk: K.

    Returns:
        The best K candidates.
    """
    num_rows, count = candidates.shape
    hidden = head_input.shape[1]
    device = head_input.device
    logits = torch.empty(num_rows, count, dtype=torch.float32, device=device)
    gather_dot_kernel[triton.cdiv(count, BLOCK_C), num_rows](
        head_input, head.weight, candidates, logits, count,
        head_input.stride(0), head.weight.stride(0), candidates.stride(0), logits.stride(0),
        HIDDEN=hidden,
        BLOCK_H=min(512, triton.next_power_of_2(hidden)),
        BLOCK_C=BLOCK_C,
        num_warps=4,
    )  # fmt: skip
    result = HeadTopk(
        log_probs=torch.empty(num_rows, topk, dtype=torch.float32, device=device),
        ids=torch.empty(num_rows, topk, dtype=torch.int64, device=device),
        log_normalizer=torch.empty(num_rows, dtype=torch.float32, device=device),
        is_finite=torch.empty(num_rows, dtype=torch.bool, device=device),
    )
    num_tiles = mass.shape[1]
    block_c = max(MIN_DOT, triton.next_power_of_2(count))
    rank_candidates_kernel[num_rows,](
        candidates, logits, mass,
        result.log_probs, result.ids, result.log_normalizer, result.is_finite,
        count, num_tiles, candidates.stride(0), mass.stride(0),
        TOPK=topk,
        BLOCK_C=block_c,
        BLOCK_T=max(MIN_DOT, triton.next_power_of_2(num_tiles)),
        num_warps=4 if block_c <= 1024 else 8,  # noqa: PLR2004 (keys of a row fit in registers)
    )  # fmt: skip
    return result


def _blocks(num_rows: int, rank: int) -> tuple[int, int]:
    # (rows, part of the rank) that one program holds; more rows would spill the keys.
    block_n = MIN_DOT if num_rows <= MIN_DOT else 32
    return block_n, min(64, max(MIN_DOT, triton.next_power_of_2(rank)))
