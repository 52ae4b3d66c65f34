"""Stage 1, global: all scores, and the best and the log mass of every group of tokens.

Programs walk over parts of the vocabulary, as those of the local kernels do.
"""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_eagle_kernels.launch import launch_options
from sgl_eagle_kernels.lm_head._triton.order import await_inputs, log_mass
from sgl_eagle_kernels.lm_head._triton.tiles import (
    PART,
    add_products,
    choose_blocks,
    load_inputs,
)
from sgl_eagle_kernels.lm_head.head import TwoStageHead


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
    whole_x = load_inputs(x_ptr, rows, whole_k, num_rows, stride_x_row, RANK)
    scores = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for step in range(((num_tiles - walker + num_walkers - 1) // num_walkers) * k_steps):
        tile = walker + (step // k_steps) * num_walkers
        tokens = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = tokens < num_tokens
        if k_steps > 1:
            k = step % k_steps * BLOCK_K + tl.arange(0, BLOCK_K)
            x = load_inputs(x_ptr, rows, k, num_rows, stride_x_row, RANK)
        else:
            k, x = whole_k, whole_x
        scores = add_products(scores, x, up_ptr, tokens, inside, k, stride_up_row, RANK, BLOCK_K)
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
