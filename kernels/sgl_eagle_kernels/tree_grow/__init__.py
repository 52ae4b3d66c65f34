"""One level of a draft tree: path log-confidence, calibrated acceptance, and the next frontier."""

from __future__ import annotations

from torch import Tensor

from sgl_eagle_kernels.tree_grow import reference
from sgl_eagle_kernels.tree_grow.level import (
    Calibration,
    GrownLevel,
    IdentityCurve,
    IsotonicCurve,
    StepTemperature,
)

__all__ = [
    "Calibration",
    "GrownLevel",
    "IdentityCurve",
    "IsotonicCurve",
    "StepTemperature",
    "grow_level",
]

MAX_LEVEL = 1024
"""Nodes of one level that one program holds."""


def grow_level(
    parent_path: Tensor,
    parent_prob: Tensor,
    child_log_probs: Tensor,
    *,
    calibration: Calibration,
    width: int,
) -> GrownLevel:
    """Score the children of a frontier and choose the next one.

    Runs a Triton kernel on CUDA and plain torch elsewhere; on CUDA it can be captured in a graph.

    Args:
        parent_path: [B, W] float32 path log-confidences of the expanded nodes, 0 for a root; minus
            infinity is padding.
        parent_prob: [B, W] float32 calibrated acceptance of the same, 1 for a root.
        child_log_probs: [B, W, K] float32, at most 0; minus infinity is padding.
        calibration: Map of this depth.
        width: Nodes of the next frontier.

    Returns:
        The level of W * K nodes.

    Raises:
        ValueError: If shapes do not fit, the level is too large, or `width` is out of range.
    """
    num_rows, num_parents, topk = child_log_probs.shape
    wanted = (num_rows, num_parents)
    if tuple(parent_path.shape) != wanted or tuple(parent_prob.shape) != wanted:
        raise ValueError(
            f"parent_path and parent_prob must be {list(wanted)}, got {list(parent_path.shape)} "
            f"and {list(parent_prob.shape)}"
        )
    if num_parents * topk > MAX_LEVEL or not 1 <= width <= num_parents * topk:
        raise ValueError(
            f"a level may have {MAX_LEVEL} nodes and width must be in [1, nodes], got "
            f"{num_parents} * {topk} nodes and {width=}"
        )
    if child_log_probs.is_cuda:
        from sgl_eagle_kernels.tree_grow._triton import grow_level as launch

        return launch(parent_path, parent_prob, child_log_probs, calibration, width)
    return reference.grow_level(parent_path, parent_prob, child_log_probs, calibration, width)
