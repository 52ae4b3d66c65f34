"""The best K candidates of each row: all places at once for few rows, one by one for many."""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_eagle_kernels.launch import launch_options, leave_shared_memory
from sgl_eagle_kernels.lm_head._triton.order import (
    add_log_masses,
    await_inputs,
    id_of,
    key_of,
    log_mass,
    missing_log_mass,
    order_of,
    score_of,
)
from sgl_eagle_kernels.lm_head.head import HeadTopk

MOST_COUNTED_ROWS = 8
"""Rows up to which counting is quicker: it compares all pairs, and many rows add up."""
MOST_COMPARED = 4096
"""Pairs of candidates that one program compares: one row leaves most of a GPU idle. Of several rows
it compares twice as many, with twice as many warps."""


@triton.jit(do_not_specialize=["num_candidates", "num_masses"])
def places_kernel(
    candidates_ptr,
    logits_ptr,
    scores_ptr,
    mass_ptr,
    log_probs_ptr,
    top_ids_ptr,
    normalizer_ptr,
    finite_ptr,
    num_candidates,
    num_masses,
    HAS_SCORES: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Places of some candidates of one row, with log-probabilities over the whole vocabulary.

    The place of a candidate is the number of those that come before it: all places are found at
    once, in no more time than one takes, where the best would have to be taken out one by one.
    """
    row = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, BLOCK_C)
    own = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    listed, is_own = lane < num_candidates, own < num_candidates
    at = row * num_candidates
    part = tl.arange(0, BLOCK_T)
    await_inputs(OVERLAP)
    ids = tl.load(candidates_ptr + at + lane, mask=listed, other=-1)
    logits = tl.load(logits_ptr + at + lane, mask=listed, other=float("-inf"))
    own_ids = tl.load(candidates_ptr + at + own, mask=is_own, other=-1)
    own_logits = tl.load(logits_ptr + at + own, mask=is_own, other=float("-inf"))
    mass = tl.load(mass_ptr + row * num_masses + part, mask=part < num_masses, other=float("-inf"))
    own_keys = _place_key(own_logits, own_ids, own)
    if HAS_SCORES:
        scores = tl.load(scores_ptr + at + lane, mask=listed, other=float("-inf"))
    else:
        scores = logits
    normalizer = _normalizer(logits, scores, mass, HAS_SCORES)
    comes_before = _place_key(logits, ids, lane)[None, :] > own_keys[:, None]
    place = tl.sum(comes_before.to(tl.int32), axis=1)
    finite = (normalizer - normalizer) == 0.0
    if tl.program_id(0) == 0:
        tl.store(normalizer_ptr + row, normalizer)
        tl.store(finite_ptr + row, finite)
    kept = is_own & (place < TOPK)
    score = score_of((own_keys >> 32).to(tl.int32))
    log_prob = tl.where(finite, score - normalizer, float("-inf"))
    tl.store(log_probs_ptr + row * TOPK + place, log_prob, mask=kept)
    token = tl.where(finite, id_of(own_keys), place.to(tl.int64))
    tl.store(top_ids_ptr + row * TOPK + place, token, mask=kept)


@triton.jit
def _normalizer(logits, scores, mass, HAS_SCORES: tl.constexpr):
    # What `log_mass` and `missing_log_mass` say, of all at once: each reduction takes several trips
    # between warps.
    number = tl.where(logits == logits, logits, float("-inf"))
    mass_number = tl.where(mass == mass, mass, float("-inf"))
    highest, mass_highest = tl.split(tl.max(tl.join(number, mass_number), axis=0))
    known = (logits > float("-inf")) & (scores > float("-inf"))
    residual = tl.where(known, logits - scores, 0.0)
    count, total = tl.split(tl.sum(tl.join(known.to(tl.float32), residual), axis=0))
    count = tl.maximum(count, 1.0)
    spread = tl.where(known, residual - total / count, 0.0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    mass_shift = tl.where(mass_highest == float("-inf"), 0.0, mass_highest)
    masses = tl.join(tl.exp(logits - shift), tl.exp(mass - mass_shift))
    sums = tl.sum(tl.join(masses, tl.join(spread * spread, spread)), axis=0)
    mass_sums, spread_sums = tl.split(sums)
    exact, dropped = tl.split(mass_sums)
    square, _ = tl.split(spread_sums)
    # The interpreter warns of the logarithm of zero.
    exact_log = shift + tl.log(tl.where(exact == 0.0, 1.0, exact))
    dropped_log = mass_shift + tl.log(tl.where(dropped == 0.0, 1.0, dropped))
    dropped_log = tl.where(dropped == 0.0, float("-inf"), dropped_log)
    if HAS_SCORES:
        dropped_log += total / count + 0.5 * square / count
    return add_log_masses(tl.where(exact == 0.0, float("-inf"), exact_log), dropped_log)


@triton.jit
def _place_key(logits, ids, lane):
    # Padding comes after all tokens, each in a place of its own.
    padding = (tl.full(lane.shape, -0x80000000, tl.int64) << 32) | (0xFFFFFFFF - lane.to(tl.int64))
    return tl.where(ids >= 0, key_of(logits, ids), padding)


@triton.jit(do_not_specialize=["num_candidates", "num_masses"])
def best_of_row_kernel(
    candidates_ptr,
    logits_ptr,
    scores_ptr,
    mass_ptr,
    log_probs_ptr,
    top_ids_ptr,
    normalizer_ptr,
    finite_ptr,
    num_candidates,
    num_masses,
    HAS_SCORES: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Best K of one row, one after the other, with log-probabilities over the whole vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_C)
    listed = lane < num_candidates
    at = row * num_candidates + lane
    part = tl.arange(0, BLOCK_T)
    await_inputs(OVERLAP)
    mass = tl.load(mass_ptr + row * num_masses + part, mask=part < num_masses, other=float("-inf"))
    ids = tl.load(candidates_ptr + at, mask=listed, other=-1)
    logits = tl.load(logits_ptr + at, mask=listed, other=float("-inf"))
    dropped = log_mass(mass, 0)
    if HAS_SCORES:
        scores = tl.load(scores_ptr + at, mask=listed, other=float("-inf"))
        dropped += missing_log_mass(logits, scores)
    normalizer = add_log_masses(log_mass(logits, 0), dropped)
    finite = (normalizer - normalizer) == 0.0
    tl.store(normalizer_ptr + row, normalizer)
    tl.store(finite_ptr + row, finite)
    # Two reductions of 32 bits are faster than one of 64.
    order = tl.where(listed, order_of(logits), -0x80000000)
    ids = tl.maximum(ids, 0).to(tl.int32)
    for rank in tl.static_range(TOPK):
        best = tl.max(order, axis=0)
        best_id = tl.min(tl.where(order == best, ids, 0x7FFFFFFF), axis=0)
        chosen = (order == best) & (ids == best_id)
        log_prob = tl.where(finite, score_of(best) - normalizer, float("-inf"))
        tl.store(log_probs_ptr + row * TOPK + rank, log_prob)
        tl.store(top_ids_ptr + row * TOPK + rank, tl.where(finite, best_id, rank).to(tl.int64))
        order = tl.where(chosen, -0x80000000, order)


def rank_candidates(
    candidates: Tensor, logits: Tensor, scores: Tensor | None, mass: Tensor, topk: int
) -> HeadTopk:
    """The best candidates of every row.

    Args:
        candidates: [N, C] int64 contiguous ids, -1 for padding.
        logits: [N, C] float32 contiguous exact logits, minus infinity for padding.
        scores: [N, C] float32 contiguous low-rank scores, likewise; None takes the masses as they
            are.
        mass: [N, T] float32 contiguous log masses of what was dropped.
        topk: K.

    Returns:
        The best K.
    """
    num_rows, count = candidates.shape
    device = candidates.device
    result = HeadTopk(
        log_probs=torch.empty(num_rows, topk, dtype=torch.float32, device=device),
        ids=torch.empty(num_rows, topk, dtype=torch.int64, device=device),
        log_normalizer=torch.empty(num_rows, dtype=torch.float32, device=device),
        is_finite=torch.empty(num_rows, dtype=torch.bool, device=device),
    )
    block_c = triton.next_power_of_2(count)
    block_t = triton.next_power_of_2(mass.shape[1])
    counts = num_rows <= MOST_COUNTED_ROWS
    if counts:
        block_c = block_t = max(block_c, block_t)
    arguments = (candidates, logits, scores, mass, *result, count, mass.shape[1])
    if counts:
        share = 1 if num_rows == 1 else 2
        block_i = min(block_c, max(1, share * MOST_COMPARED // block_c))
        kernel = places_kernel[triton.cdiv(count, block_i), num_rows](
            *arguments,
            HAS_SCORES=scores is not None,
            TOPK=topk,
            BLOCK_C=block_c,
            BLOCK_T=block_t,
            BLOCK_I=block_i,
            num_warps=4 * share,
            **launch_options(device),
        )
        leave_shared_memory(kernel)
        return result
    best_of_row_kernel[num_rows,](
        *arguments,
        HAS_SCORES=scores is not None,
        TOPK=topk,
        BLOCK_C=block_c,
        BLOCK_T=block_t,
        num_warps=4 if block_c <= 1024 else 8,  # noqa: PLR2004 (a row fits in registers)
        **launch_options(device),
    )
    return result
