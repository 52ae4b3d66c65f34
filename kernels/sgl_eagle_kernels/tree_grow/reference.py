"""Growing a level in plain torch: what the kernel must reproduce."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_eagle_kernels.lm_head.order import rank_keys
from sgl_eagle_kernels.tree_grow.level import (
    LEAST_REST,
    MOST_EXPONENT,
    Calibration,
    GrownLevel,
    IdentityCurve,
    StepTemperature,
)


def grow_level(
    parent_path: Tensor,
    parent_prob: Tensor,
    child_log_probs: Tensor,
    calibration: Calibration,
    width: int,
) -> GrownLevel:
    """Score the children of a frontier and choose the next one.

    Args:
        parent_path: [B, W] float32.
        parent_prob: [B, W] float32.
        child_log_probs: [B, W, K] float32.
        calibration: Map of this depth.
        width: Nodes of the next frontier.

    Returns:
        The level.
    """
    path = parent_path[:, :, None] + child_log_probs
    prob = calibrate(path, child_log_probs, parent_prob[:, :, None], calibration)
    prob = prob.where(path > -torch.inf, 0.0).flatten(1)
    path = path.flatten(1)
    columns = torch.arange(path.shape[1], device=path.device)
    order = rank_keys(path, columns).topk(width, dim=-1).indices
    frontier_path = path.gather(1, order)
    real = frontier_path > -torch.inf
    return GrownLevel(
        path=path,
        prob=prob,
        frontier=order.where(real, -1),
        frontier_path=frontier_path,
        frontier_prob=prob.gather(1, order),
    )


def calibrate(path: Tensor, step: Tensor, parent_prob: Tensor, calibration: Calibration) -> Tensor:
    """Map confidences of one depth.

    Args:
        path: [...] float32 path log-confidences.
        step: [...] float32 step log-probabilities.
        parent_prob: Float32 that broadcasts against them.
        calibration: Map of this depth.

    Returns:
        [...] float32, at most `parent_prob`.
    """
    if isinstance(calibration, IdentityCurve):
        return torch.minimum(path.exp(), parent_prob)
    if isinstance(calibration, StepTemperature):
        rest = (1 - step.exp()).clamp(min=LEAST_REST)
        against = (rest.log() - step) / calibration.temperature
        return parent_prob / (1 + against.clamp(max=MOST_EXPONENT).exp())
    knots = calibration.knots
    scale = (len(knots) - 1) / -calibration.lowest_log
    place = (path.clamp(calibration.lowest_log, 0.0) - calibration.lowest_log) * scale
    left = place.long().clamp(max=len(knots) - 1)
    share = place - left
    right = (left + 1).clamp(max=len(knots) - 1)
    curve = knots[left] * (1 - share) + knots[right] * share
    return torch.minimum(curve, parent_prob)
