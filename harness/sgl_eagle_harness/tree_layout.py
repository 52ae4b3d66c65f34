"""From parents to what tree attention needs; kernels must reproduce these arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_eagle_harness.types import NO_NODE, BoolArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLayout:
    """One verified tree of M nodes, node 0 the root, parents before children.

    Attributes:
        depths: [M] int64, 0 for the root.
        positions: [M] int64, position of each token in the sequence.
        ancestors: [M, M] bool; row i marks the nodes that node i attends to: its path and itself.
        first_child: [M] int64, lowest child or `NO_NODE` (SGLang: `retrive_next_token`).
        next_sibling: [M] int64, next higher child of the same parent or `NO_NODE` (SGLang:
            `retrive_next_sibling`).
    """

    depths: IntArray
    positions: IntArray
    ancestors: BoolArray
    first_child: IntArray
    next_sibling: IntArray


def build_layout(parents: IntArray, root_position: int) -> TreeLayout:
    """Lay out one tree.

    Args:
        parents: [M] int64; `NO_NODE` for node 0, lower than the node for all others.
        root_position: Position of the root's token, i.e. the tokens before it.

    Returns:
        Depths, positions, attention mask and child links.
    """
    num_nodes = len(parents)
    ancestors = ancestor_mask(parents)
    first_child = np.full(num_nodes, NO_NODE)
    next_sibling = np.full(num_nodes, NO_NODE)
    for node in range(num_nodes - 1, 0, -1):
        next_sibling[node] = first_child[parents[node]]
        first_child[parents[node]] = node
    depths = ancestors.sum(axis=1) - 1
    return TreeLayout(
        depths=depths,
        positions=root_position + depths,
        ancestors=ancestors,
        first_child=first_child,
        next_sibling=next_sibling,
    )


def ancestor_mask(parents: IntArray) -> BoolArray:
    """Which nodes each node of a tree attends to.

    Args:
        parents: [M] int64; `NO_NODE` for node 0, lower than the node for all others.

    Returns:
        [M, M] bool; row i marks the path from the root to node i, both included.
    """
    mask = np.eye(len(parents), dtype=np.bool_)
    for node in range(1, len(parents)):
        mask[node] |= mask[parents[node]]
    return mask
