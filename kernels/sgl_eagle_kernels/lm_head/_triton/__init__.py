"""The two-stage head in Triton: what is launched, in order.

The local route launches three kernels for one row and four for more, the global one five. On GPUs
that can, each is launched while the one before it still runs.
"""

from __future__ import annotations

from torch import Tensor

from sgl_eagle_kernels.lm_head._triton.groups import score_groups
from sgl_eagle_kernels.lm_head._triton.local import find_local
from sgl_eagle_kernels.lm_head._triton.projection import project
from sgl_eagle_kernels.lm_head._triton.rank import rank_candidates
from sgl_eagle_kernels.lm_head._triton.row import can_stream_row, stream_row
from sgl_eagle_kernels.lm_head._triton.select import choose_group_size, select_top
from sgl_eagle_kernels.lm_head._triton.stage2 import gather_dot
from sgl_eagle_kernels.lm_head._triton.stream import StreamPlan, can_stream, stream_tiles
from sgl_eagle_kernels.lm_head.head import HeadTopk, LocalTop, TwoStageHead


def two_stage_topk(
    head_input: Tensor, head: TwoStageHead, topk: int, plan: StreamPlan | None = None
) -> HeadTopk:
    """Both stages, without synchronisation.

    Args:
        head_input: [N, H] contiguous, in the dtype of the weights.
        head: Weights.
        topk: K, at most `head.most_topk`.
        plan: How few rows are cut into programs; None takes the default.

    Returns:
        The best K tokens of each row.
    """
    x = project(head_input, head)
    if can_stream_row(x, head, plan):
        row = stream_row(x, head, head_input, plan)
        return rank_candidates(row.ids, row.logits, row.scores, row.mass, topk)
    if can_stream(x, head):
        candidates, scores, mass = stream_tiles(x, head, plan)
    else:
        candidates, scores, mass = find_candidates(x, head)
    return rank_listed(head_input, head.weight, candidates, scores, mass, topk)


def rank_listed(
    head_input: Tensor,
    weight: Tensor,
    candidates: Tensor,
    scores: Tensor | None,
    mass: Tensor,
    topk: int,
) -> HeadTopk:
    """Stage 2.

    Args:
        head_input: [N, H] contiguous.
        weight: [>= V, H] contiguous along H.
        candidates: [N, C] int64 contiguous, -1 for padding.
        scores: [N, C] float32 contiguous low-rank scores, minus infinity for padding; None takes
            the masses as they are.
        mass: [N, T] float32 contiguous log masses of what was dropped.
        topk: K, at most C.

    Returns:
        The best K candidates of each row.
    """
    logits = gather_dot(head_input, weight, candidates)
    return rank_candidates(candidates, logits, scores, mass, topk)


def find_candidates(x: Tensor, head: TwoStageHead) -> tuple[Tensor, Tensor, Tensor]:
    """Stage 1.

    Args:
        x: [N, R] contiguous low-rank inputs.
        head: Weights.

    Returns:
        [N, C] int64 candidates, -1 for padding, [N, C] float32 low-rank scores, minus infinity for
        padding, and [N, T] float32 log masses of what was dropped, for some number T of parts.
    """
    if isinstance(head.shortlist, LocalTop):
        return find_local(x, head, head.shortlist)
    count = head.num_candidates
    group_size = choose_group_size(head.num_tokens, count)
    all_scores, best, mass = score_groups(x, head, group_size)
    return select_top(all_scores, best, mass, group_size=group_size, count=count)
