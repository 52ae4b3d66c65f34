"""The full head's best tokens: what remains to be done once its logits are known."""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from sgl_eagle_kernels.launch import launch_options
from sgl_eagle_kernels.lm_head._triton.order import await_inputs, log_mass
from sgl_eagle_kernels.lm_head._triton.rank import rank_candidates
from sgl_eagle_kernels.lm_head._triton.select import choose_group_size, select_top
from sgl_eagle_kernels.lm_head.head import HeadTopk

BLOCK_V = 4096


@triton.jit
def group_logits_kernel(
    logits_ptr,
    best_ptr,
    mass_ptr,
    num_tokens,
    stride_logits_row,
    stride_group_row,
    GROUP: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Best logit and log mass of every group of tokens of one row."""
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * (BLOCK_V // GROUP) + tl.arange(0, BLOCK_V // GROUP)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    await_inputs(OVERLAP)
    logits = tl.load(
        logits_ptr + row * stride_logits_row + token, mask=token < num_tokens, other=float("-inf")
    ).to(tl.float32)
    best = tl.max(tl.where(logits == logits, logits, float("-inf")), axis=1)
    at = row * stride_group_row + group
    inside = group * GROUP < num_tokens
    tl.store(best_ptr + at, best, mask=inside)
    tl.store(mass_ptr + at, log_mass(logits, 1), mask=inside)


def full_topk(head_input: Tensor, weight: Tensor, topk: int) -> HeadTopk:
    """Logits by torch, then three launches, without synchronisation.

    Args:
        head_input: [N, H] in the dtype of the weights.
        weight: [V, H].
        topk: K.

    Returns:
        The best K tokens of each row.
    """
    logits = functional.linear(head_input, weight)
    num_rows, num_tokens = logits.shape
    group_size = choose_group_size(num_tokens, topk)
    num_groups = triton.cdiv(num_tokens, group_size)
    best = torch.empty(num_rows, num_groups, dtype=torch.float32, device=logits.device)
    mass = torch.empty(num_rows, num_groups, dtype=torch.float32, device=logits.device)
    group_logits_kernel[triton.cdiv(num_tokens, BLOCK_V), num_rows](
        logits, best, mass, num_tokens, logits.stride(0), best.stride(0),
        GROUP=group_size,
        BLOCK_V=BLOCK_V,
        num_warps=8,
        **launch_options(logits.device),
    )  # fmt: skip
    ids, _, dropped = select_top(logits, best, mass, group_size=group_size, count=topk)
    chosen = logits.gather(1, ids.clamp(min=0)).float().masked_fill_(ids < 0, -torch.inf)
    return rank_candidates(ids, chosen, None, dropped, topk)
