"""The draft loop: the one place where a policy and a drafter meet, on line and in replay."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.types import (
    NO_NODE,
    BatchContext,
    CandidateTrees,
    Children,
    DraftTree,
    IntArray,
)


class Drafter(Protocol):
    """Whatever proposes children: a draft model, or a dense trace that recorded one."""

    def expand_root(self, topk: int) -> Children:
        """First draft step.

        Args:
            topk: Children to return.

        Returns:
            [B, 1, topk] children of the roots.
        """
        ...

    def expand(self, handles: IntArray, topk: int) -> Children:
        """One more draft step.

        Args:
            handles: [B, W] int64, handles of the nodes to expand; `NO_NODE` is padding.
            topk: Children to return of each.

        Returns:
            [B, W, topk] children, invalid where the handle was padding.
        """
        ...


def grow_trees(drafter: Drafter, policy: SpecPolicy, batch: BatchContext) -> CandidateTrees:
    """Draft until the policy stops.

    Args:
        drafter: Source of children for the same B rows as `batch`.
        policy: Must have limits, i.e. draft at all.
        batch: B rows.

    Returns:
        All drafted nodes, at most `policy.limits.num_steps` levels.
    """
    limits = policy.limits
    trees = CandidateTrees.empty(batch.num_rows)
    if limits is None:
        return trees
    rows = np.arange(batch.num_rows)[:, None]
    root = np.full((batch.num_rows, 1), NO_NODE)
    trees = trees.append(root, drafter.expand_root(limits.topk))
    while trees.depth < limits.num_steps:
        frontier = policy.select_frontier(trees, batch)
        if not (frontier != NO_NODE).any():
            break
        handles = np.where(frontier == NO_NODE, NO_NODE, trees.handles[rows, frontier])
        trees = trees.append(frontier, drafter.expand(handles, limits.topk))
    return trees


def verify_tree(trees: CandidateTrees, row: int, columns: IntArray, root_token: int) -> DraftTree:
    """Renumber one row's selected nodes for the target.

    Args:
        trees: Finished trees.
        row: Which request.
        columns: [M] int64 from `SpecPolicy.select_verify`, ascending, padding at the end.
        root_token: Last token that the target committed.

    Returns:
        The tree with the root as node 0.
    """
    columns = columns[columns != NO_NODE]
    new_index = np.full(trees.num_nodes + 1, NO_NODE)
    new_index[columns] = np.arange(1, len(columns) + 1)
    new_index[NO_NODE] = 0  # the last element: parents of depth-1 nodes are NO_NODE, i.e. the root
    return DraftTree(
        tokens=np.concatenate([[root_token], trees.tokens[row, columns]]),
        parents=np.concatenate([[NO_NODE], new_index[trees.parents[row, columns]]]),
        depths=np.concatenate([[0], trees.depths[columns]]),
        path_log_confidence=np.concatenate(
            [np.zeros(1, np.float32), trees.path_log_confidence[row, columns]]
        ),
        columns=np.concatenate([[NO_NODE], columns]),
    )
