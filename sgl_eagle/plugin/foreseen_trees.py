"""Trees whose every level was drafted without asking the policy, put together at once."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from sgl_eagle.plugin.round_mail import RoundMail
from sgl_eagle_harness.types import NO_NODE, BoolArray, CandidateTrees, Float32Array, IntArray


def assemble_trees(
    layout: RoundMail,
    mail: npt.NDArray[np.int32],
    num_steps: int,
    *,
    topk: int,
    speculating: BoolArray,
) -> CandidateTrees:
    """What `grow_trees` returns for a policy that takes the device's frontiers as they are.

    Args:
        layout: Of the mail.
        mail: [B, width], after all draft steps.
        num_steps: Draft steps after that of the roots.
        topk: Children of a node that the policy takes, and nodes that it expands in a step.
        speculating: [B] bool, which requests draft.

    Returns:
        Trees of a level for the roots and for each step, up to the first that no request has.
    """
    branches, num_rows = layout.branches, len(mail)
    levels = [layout.level(mail, index)[:, :, :topk, :topk] for index in range(num_steps + 1)]
    levels[0] = levels[0][:, :, :1]
    joined = np.concatenate([level.reshape(num_rows, 2, -1) for level in levels], axis=2)
    log_probs: Float32Array = np.ascontiguousarray(joined[:, 1]).view(np.float32)
    finite: BoolArray = np.isfinite(log_probs)
    groups: BoolArray = np.asarray(finite.reshape(num_rows, -1, topk).all(axis=2))
    groups[:, 0] &= speculating  # a group is the children of one node
    parents = np.full(log_probs.shape, NO_NODE)
    paths = log_probs.copy()
    starts, num_nodes = [0], topk
    for step in range(num_steps):
        frontier = layout.frontier(mail, step)[:, :topk]
        expanded = (frontier >= 0) & speculating[:, None]
        if not expanded.any():
            break
        inside = frontier // branches * topk + frontier % branches
        columns = np.where(expanded, inside + starts[-1], NO_NODE)
        groups[:, 1 + step * topk :][:, :topk] &= expanded
        children = slice(num_nodes, num_nodes + topk**2)
        parents[:, children] = columns.repeat(topk, axis=1)
        rows = np.arange(num_rows)[:, None]
        paths[:, children] += paths[rows, columns].repeat(topk, axis=1)
        starts.append(num_nodes)
        num_nodes += topk**2
    valid = groups.repeat(topk, axis=1)[:, :num_nodes]
    depths, ranks, handles = _shape(branches, topk, num_nodes)
    lowest = np.float32(-np.inf)
    return CandidateTrees(
        tokens=joined[:, 0, :num_nodes].astype(np.int64),
        parents=parents[:, :num_nodes],
        depths=depths,
        ranks=ranks,
        step_log_probs=np.where(valid, log_probs[:, :num_nodes], lowest),
        path_log_confidence=np.where(valid, paths[:, :num_nodes], lowest),
        handles=np.broadcast_to(handles, (num_rows, num_nodes)),
        valid=valid,
        level_starts=starts,
    )


@lru_cache
def _shape(branches: int, topk: int, num_nodes: int) -> tuple[IntArray, IntArray, IntArray]:
    # Depth, rank and handle of every column; a handle is a column of the whole level.
    columns = np.arange(num_nodes)
    later = columns >= topk
    in_level = np.where(later, (columns - topk) % topk**2, columns)
    depths = np.where(later, 2 + (columns - topk) // topk**2, 1)
    return depths, columns % topk, in_level // topk * branches + in_level % topk
