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
    frontiers = layout.frontiers(mail).reshape(num_rows, -1, branches)[:, :num_steps, :topk]
    expanded = (frontiers >= 0) & speculating[:, None, None]
    # A level that nobody has ends the trees: no later one has parents.
    num_steps = int(np.logical_and.accumulate(expanded.any(axis=(0, 2))).sum())
    frontiers, expanded = frontiers[:, :num_steps], expanded[:, :num_steps]
    levels = [layout.level(mail, index)[:, :, :topk, :topk] for index in range(num_steps + 1)]
    levels[0] = levels[0][:, :, :1]
    joined = np.concatenate([level.reshape(num_rows, 2, -1) for level in levels], axis=2)
    log_probs: Float32Array = np.ascontiguousarray(joined[:, 1]).view(np.float32)
    num_nodes = log_probs.shape[1]
    starts = [0, *range(topk, num_nodes, topk**2)]
    inside = frontiers // branches * topk + frontiers % branches
    columns = np.where(expanded, inside + np.array(starts[:-1])[:, None], NO_NODE)
    finite: BoolArray = np.isfinite(log_probs)
    groups: BoolArray = np.asarray(finite.reshape(num_rows, -1, topk).all(axis=2))
    groups[:, 0] &= speculating  # a group is the children of one node
    groups[:, 1:] &= expanded.reshape(num_rows, -1)
    parents = np.full(log_probs.shape, NO_NODE)
    parents[:, topk:] = columns.reshape(num_rows, -1).repeat(topk, axis=1)
    paths = log_probs.copy()
    rows = np.arange(num_rows)[:, None]
    for step, start in enumerate(starts[1:]):
        paths[:, start : start + topk**2] += paths[rows, columns[:, step]].repeat(topk, axis=1)
    valid = groups.repeat(topk, axis=1)
    depths, ranks, handles = _shape(branches, topk, num_nodes)
    lowest = np.float32(-np.inf)
    return CandidateTrees(
        tokens=joined[:, 0].astype(np.int64),
        parents=parents,
        depths=depths,
        ranks=ranks,
        step_log_probs=np.where(valid, log_probs, lowest),
        path_log_confidence=np.where(valid, paths, lowest),
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
