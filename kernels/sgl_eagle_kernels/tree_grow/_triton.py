"""Triton kernel of tree growth: one program a request holds its whole level."""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_eagle_kernels.lm_head._triton.order import id_of, key_of
from sgl_eagle_kernels.tree_grow.level import (
    LEAST_REST,
    MOST_EXPONENT,
    Calibration,
    GrownLevel,
    IsotonicCurve,
    StepTemperature,
)

IDENTITY, TEMPERATURE, ISOTONIC = range(3)


@triton.jit
def _calibrate(path, step, above, knots_ptr, number, num_knots, KIND: tl.constexpr,
               LEAST_REST: tl.constexpr, MOST_EXPONENT: tl.constexpr):  # fmt: skip
    if KIND == 0:
        prob = tl.minimum(tl.exp(path), above)
    elif KIND == 1:
        rest = tl.maximum(1.0 - tl.exp(step), LEAST_REST)
        against = (tl.log(rest) - step) / number
        prob = above / (1.0 + tl.exp(tl.minimum(against, MOST_EXPONENT)))
    else:
        scale = (num_knots - 1) / -number
        place = (tl.minimum(tl.maximum(path, number), 0.0) - number) * scale
        left = tl.minimum(place.to(tl.int32), num_knots - 1)
        share = place - left.to(tl.float32)
        right = tl.minimum(left + 1, num_knots - 1)
        curve = tl.load(knots_ptr + left) * (1.0 - share) + tl.load(knots_ptr + right) * share
        prob = tl.minimum(curve, above)
    return prob


@triton.jit
def grow_level_kernel(
    parent_path_ptr,
    parent_prob_ptr,
    step_ptr,
    knots_ptr,
    path_ptr,
    prob_ptr,
    frontier_ptr,
    frontier_path_ptr,
    frontier_prob_ptr,
    number,
    num_knots,
    num_parents,
    num_nodes,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    LEAST_REST: tl.constexpr,
    MOST_EXPONENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Path sums, calibrated acceptance and the best nodes of one level of one request."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < num_nodes
    parent = lane // TOPK
    above_path = tl.load(
        parent_path_ptr + row * num_parents + parent, mask=inside, other=float("-inf")
    )
    above = tl.load(parent_prob_ptr + row * num_parents + parent, mask=inside, other=0.0)
    step = tl.load(step_ptr + row * num_nodes + lane, mask=inside, other=float("-inf"))
    path = above_path + step
    # A padding lane takes a step of certainty, so that no infinity enters the arithmetic.
    real = path > float("-inf")
    prob = _calibrate(tl.where(real, path, 0.0), tl.where(real, step, 0.0), above, knots_ptr,
                      number, num_knots, KIND, LEAST_REST, MOST_EXPONENT)  # fmt: skip
    prob = tl.where(real, prob, 0.0)
    tl.store(path_ptr + row * num_nodes + lane, path, mask=inside)
    tl.store(prob_ptr + row * num_nodes + lane, prob, mask=inside)
    keys = tl.where(inside, key_of(path, lane), -0x8000000000000000)
    for rank in tl.static_range(WIDTH):
        best = tl.max(keys, axis=0)
        chosen = keys == best
        best_path = tl.max(tl.where(chosen, path, float("-inf")), axis=0)
        best_prob = tl.max(tl.where(chosen, prob, 0.0), axis=0)
        at = row * WIDTH + rank
        tl.store(frontier_ptr + at, tl.where(best_path > float("-inf"), id_of(best), -1))
        tl.store(frontier_path_ptr + at, best_path)
        tl.store(frontier_prob_ptr + at, best_prob)
        keys = tl.where(chosen, -0x8000000000000000, keys)


def grow_level(
    parent_path: Tensor,
    parent_prob: Tensor,
    child_log_probs: Tensor,
    calibration: Calibration,
    width: int,
) -> GrownLevel:
    """Score the children of a frontier and choose the next one, in one launch.

    Args:
        parent_path: [B, W] float32.
        parent_prob: [B, W] float32.
        child_log_probs: [B, W, K] float32.
        calibration: Map of this depth.
        width: Nodes of the next frontier.

    Returns:
        The level.
    """
    num_rows, num_parents, topk = child_log_probs.shape
    num_nodes = num_parents * topk
    device = child_log_probs.device

    def empty(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(num_rows, count, dtype=dtype, device=device)

    level = GrownLevel(
        path=empty(num_nodes),
        prob=empty(num_nodes),
        frontier=empty(width, torch.int64),
        frontier_path=empty(width),
        frontier_prob=empty(width),
    )
    kind, number, knots = IDENTITY, 1.0, level.path
    if isinstance(calibration, StepTemperature):
        kind, number = TEMPERATURE, calibration.temperature
    elif isinstance(calibration, IsotonicCurve):
        kind, number, knots = ISOTONIC, calibration.lowest_log, calibration.knots
    block = triton.next_power_of_2(num_nodes)
    grow_level_kernel[num_rows,](
        parent_path.contiguous(), parent_prob.contiguous(), child_log_probs.contiguous(), knots,
        *level, number, knots.shape[0] if kind == ISOTONIC else 1, num_parents, num_nodes,
        TOPK=topk,
        WIDTH=width,
        KIND=kind,
        LEAST_REST=LEAST_REST,
        MOST_EXPONENT=MOST_EXPONENT,
        BLOCK=block,
        num_warps=1 if block <= 128 else 4,  # noqa: PLR2004 (one warp needs no shared memory)
    )  # fmt: skip
    return level
