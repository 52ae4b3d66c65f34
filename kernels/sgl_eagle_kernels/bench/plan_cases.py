"""Cases of one kernel: how the two-stage head of few rows may be cut into programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sgl_eagle_kernels.bench.case import Case, Prepared
from sgl_eagle_kernels.bench.head_cases import (
    TOPK,
    choose_tile_size,
    compare_heads,
    draw_head,
    random_normal,
    two_stage_case,
)
from sgl_eagle_kernels.lm_head import HeadTopk, LocalTop, TwoStageHead

MOST_ROWS = 8
SPARE_BYTES = 16384
"""Of a multiprocessor's memory, for all but the parts of the low-rank matrix."""


def plan_cases(num_tokens: int, hidden: int, num_rows: int, rank: int) -> Iterator[Case]:
    """The two-stage head of few rows, cut in every way that fits the GPU.

    Args:
        num_tokens: V.
        hidden: H.
        num_rows: N, at most 8.
        rank: R.

    Yields:
        The default first.
    """
    # Imported late: only CUDA machines need Triton.
    from sgl_eagle_kernels.launch import shared_memory_bytes
    from sgl_eagle_kernels.lm_head._triton import two_stage_topk
    from sgl_eagle_kernels.lm_head._triton.stream import PLAN, StreamPlan

    shortlist = LocalTop(tile_size=choose_tile_size(num_tokens), per_tile=1)
    plain = two_stage_case(num_tokens, hidden, num_rows, rank, shortlist)
    shared = shared_memory_bytes(torch.device("cuda", torch.cuda.current_device()))

    def case_of(plan: StreamPlan) -> Case:
        def call(x: Tensor, head: TwoStageHead, topk: int) -> HeadTopk:
            return two_stage_topk(x, head, topk, plan)

        def prepare(seed: int) -> Prepared:
            head = draw_head(seed, num_tokens, hidden, rank, shortlist, quantize=False)
            x = random_normal(seed + 2, num_rows, hidden).bfloat16()
            return Prepared(
                run=lambda: call(x, head, TOPK), check=lambda: compare_heads(x, head, TOPK, call)
            )

        cut = f"{plan.programs} x {plan.stages} stages of {plan.tokens}, {plan.warps} warps"
        return replace(plain, variant=f"{plain.variant}, {cut}", prepare=prepare)

    tried = (
        StreamPlan(programs=programs, stages=stages, tokens=tokens, warps=warps)
        for programs in (1, 2, 3, 4)
        for stages in (3, 4, 5, 7)
        for tokens, warps in ((32, 2), (64, 4), (128, 8))
    )
    fitting = [plan for plan in tried if plan.shared_bytes(rank) + SPARE_BYTES <= shared]
    yield from (case_of(plan) for plan in dict.fromkeys([PLAN, *fitting]))
