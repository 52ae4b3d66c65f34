"""The exact best scores of a row, without sorting: one program a row.

A token among the best C lies in a group whose best score is among the best C of all groups, so C
groups are chosen first and C tokens from them.
"""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_eagle_kernels.launch import launch_options
from sgl_eagle_kernels.lm_head._triton.order import (
    add_log_masses,
    await_inputs,
    log_mass,
    order_of,
)

LEAST_GROUP, MOST_GROUP = 4, 64


@triton.jit
def find_threshold(order, COUNT: tl.constexpr):
    """Bisect the bits of [BLOCK] int32.

    Returns the highest integer that at least COUNT lanes reach, or an earlier one that exactly
    COUNT reach, and how many reach it. Lanes that hold the lowest integer are not counted.
    """
    lowest: tl.constexpr = -0x80000000
    high = tl.max(order, axis=0)
    low = tl.min(tl.where(order == lowest, high, order), axis=0)
    # Leading bits that all share need no round. Of integers of both signs the first bit is 2^31.
    spread = (low ^ high).to(tl.uint32, bitcast=True)
    span = spread | (spread >> 1)
    span = span | (span >> 2)
    span = span | (span >> 4)
    span = span | (span >> 8)
    span = span | (span >> 16)
    threshold = high & ~span.to(tl.int32, bitcast=True)
    step = (span - (span >> 1)).to(tl.int32, bitcast=True)
    # With both signs in play the highest bit falls as the numbers rise.
    threshold = tl.where(step == lowest, lowest, threshold)
    held = tl.sum((order > lowest).to(tl.int32), axis=0)
    while (step != 0) & (held > COUNT):
        raised = threshold + step
        reached = tl.sum((order >= raised).to(tl.int32), axis=0)
        threshold = tl.where(reached >= COUNT, raised, threshold)
        held = tl.where(reached >= COUNT, reached, held)
        step = (step.to(tl.uint32, bitcast=True) >> 1).to(tl.int32, bitcast=True)
    return threshold, held


@triton.jit
def count_up_to(marks):
    """[BLOCK] int32 marked lanes up to each; in rows of a warp, where one scan would be slow."""
    warp: tl.constexpr = 32
    if marks.shape[0] > warp:
        rows = tl.reshape(marks.to(tl.int32), (marks.shape[0] // warp, warp))
        in_row = tl.sum(rows, axis=1)
        before = tl.cumsum(in_row, axis=0) - in_row
        counts = tl.reshape(tl.cumsum(rows, axis=1) + before[:, None], (marks.shape[0],))
    else:
        counts = tl.cumsum(marks.to(tl.int32), axis=0)
    return counts


@triton.jit
def keep_top(order, COUNT: tl.constexpr):
    """Marks of the COUNT highest of [BLOCK] int32, the lowest lanes among equals.

    Returns also the place of each among the marked, and an integer that all marked reach. Lanes
    that must not be marked hold the lowest integer; at least COUNT lanes must not.
    """
    threshold, held = find_threshold(order, COUNT)
    lowest: tl.constexpr = -0x80000000
    kept = (order >= threshold) & (order > lowest)
    if held > COUNT:
        tied = order == threshold
        num_tied = COUNT - tl.sum((order > threshold).to(tl.int32), axis=0)
        kept = kept & ((order > threshold) | (count_up_to(tied) <= num_tied))
    return kept, count_up_to(kept) - 1, threshold


@triton.jit(do_not_specialize=["num_tokens", "num_groups"])
def select_top_kernel(
    scores_ptr,
    best_ptr,
    mass_ptr,
    groups_ptr,
    candidates_ptr,
    chosen_ptr,
    dropped_ptr,
    num_tokens,
    num_groups,
    stride_scores_row,
    stride_group_row,
    COUNT: tl.constexpr,
    GROUP_COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The best COUNT tokens of one row in order of id, and the log mass of all others."""
    row = tl.program_id(0).to(tl.int64)
    lowest: tl.constexpr = -0x80000000
    await_inputs(OVERLAP)
    group = tl.arange(0, BLOCK_G)
    in_groups = group < num_groups
    at_group = row * stride_group_row + group
    best = tl.load(best_ptr + at_group, mask=in_groups, other=float("-inf"))
    mass = tl.load(mass_ptr + at_group, mask=in_groups, other=float("-inf"))
    kept, place, reached = keep_top(tl.where(in_groups, order_of(best), lowest), GROUP_COUNT)
    tl.store(groups_ptr + row * GROUP_COUNT + place, group, mask=kept)
    broken = tl.max((mass != mass).to(tl.int32), axis=0)
    outside = log_mass(tl.where(kept, float("-inf"), mass), 0)
    # Other threads of the same program read what was stored.
    tl.debug_barrier()
    element = tl.arange(0, BLOCK_E)
    listed = element // GROUP < GROUP_COUNT
    token = tl.load(groups_ptr + row * GROUP_COUNT + element // GROUP, mask=listed, other=0)
    token = token * GROUP + element % GROUP
    listed = listed & (token < num_tokens)
    score = tl.load(scores_ptr + row * stride_scores_row + token, mask=listed, other=float("-inf"))
    score = score.to(tl.float32)
    order = order_of(score)
    if GROUP_COUNT == COUNT:
        # As many groups have a token that reaches the threshold of groups: the others are out.
        listed = listed & (order >= reached)
    kept, place, _ = keep_top(tl.where(listed, order, lowest), COUNT)
    real = score > float("-inf")
    tl.store(
        candidates_ptr + row * COUNT + place, tl.where(real, token, -1).to(tl.int64), mask=kept
    )
    tl.store(chosen_ptr + row * COUNT + place, score, mask=kept)
    dropped = add_log_masses(log_mass(tl.where(kept, float("-inf"), score), 0), outside)
    tl.store(dropped_ptr + row, tl.where(broken != 0, float("nan"), dropped))


def choose_group_size(num_tokens: int, count: int) -> int:
    """Group size for which groups and tokens of chosen groups are about equally many.

    Args:
        num_tokens: V.
        count: C.

    Returns:
        A power of two.
    """
    size = LEAST_GROUP
    while size < MOST_GROUP and size * size * count < num_tokens:
        size *= 2
    return size


def select_top(
    scores: Tensor, best: Tensor, mass: Tensor, *, group_size: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The exact best tokens of every row, in one launch.

    Args:
        scores: [N, V].
        best: [N, G] float32 best score of each group.
        mass: [N, G] float32 log mass of each group, NaN where it had NaN or plus infinity.
        group_size: Tokens in a group; the last has the rest.
        count: C, at most V.

    Returns:
        [N, C] int64 candidates in order of id, -1 for those of minus infinity, their [N, C] float32
        scores, and [N, 1] float32 log mass of all other tokens.
    """
    num_rows, num_tokens = scores.shape
    num_groups = best.shape[1]
    group_count = min(count, num_groups)
    groups = torch.empty(num_rows, group_count, dtype=torch.int32, device=scores.device)
    candidates = torch.empty(num_rows, count, dtype=torch.int64, device=scores.device)
    chosen = torch.empty(num_rows, count, dtype=torch.float32, device=scores.device)
    dropped = torch.empty(num_rows, 1, dtype=torch.float32, device=scores.device)
    block_g = triton.next_power_of_2(num_groups)
    block_e = triton.next_power_of_2(group_count * group_size)
    select_top_kernel[num_rows,](
        scores, best, mass, groups, candidates, chosen, dropped,
        num_tokens, num_groups, scores.stride(0), best.stride(0),
        COUNT=count,
        GROUP_COUNT=group_count,
        GROUP=group_size,
        BLOCK_G=block_g,
        BLOCK_E=block_e,
        num_warps=min(32, max(4, max(block_g, block_e) // 512)),
        **launch_options(scores.device),
    )  # fmt: skip
    return candidates, chosen, dropped
