"""Packs pruned trees into the arrays that SGLang verifies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sgl_eagle_harness.types import NO_NODE, BoolArray, CandidateTrees, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTrees:
    """Trees of B requests, padded to M nodes; node 0 of each is its root.

    A padding node sees itself and the root, and no link leads to it, so it can never be accepted.

    Attributes:
        tokens: [B, M] int64; 0 where padded, and for the roots, whose tokens only the device knows.
        depths: [B, M] int64, 0 for the root, 1 for padding.
        ancestors: [B, M, M] bool; row i marks the nodes that node i attends to.
        first_child: [B, M] int64, or `NO_NODE`.
        next_sibling: [B, M] int64, or `NO_NODE`.
        num_draft_tokens: [B] int64, nodes of each tree without its padding.
        num_steps: Depth of the deepest tree.
    """

    tokens: IntArray
    depths: IntArray
    ancestors: BoolArray
    first_child: IntArray
    next_sibling: IntArray
    num_draft_tokens: IntArray
    num_steps: int


def pack_trees(trees: CandidateTrees, columns: IntArray) -> PackedTrees:
    """Lay out the selected nodes of all requests at once.

    Loops over nodes and not over requests: a batch of 256 costs as many array operations as one.

    Args:
        trees: Drafted nodes of B requests; may be empty.
        columns: [B, C] int64 from `SpecPolicy.select_verify`.

    Returns:
        Trees of M = 1 + C nodes, less columns that are padding everywhere.
    """
    num_rows = len(columns)
    present = columns != NO_NODE
    columns = columns[:, : int(present.sum(axis=1).max(initial=0))]
    present = columns != NO_NODE
    num_nodes = 1 + columns.shape[1]
    rows = np.arange(num_rows)
    tokens = np.zeros((num_rows, num_nodes), np.int64)
    depths = np.zeros((num_rows, num_nodes), np.int64)
    ancestors = np.broadcast_to(np.eye(num_nodes, dtype=np.bool_), (num_rows, num_nodes, num_nodes))
    ancestors = ancestors.copy()
    ancestors[:, :, 0] = True
    first_child = np.full((num_rows, num_nodes), NO_NODE)
    next_sibling = np.full((num_rows, num_nodes), NO_NODE)
    if num_nodes > 1:
        picked = np.where(present, columns, 0)
        tokens[:, 1:] = np.where(present, trees.tokens[rows[:, None], picked], 0)
        depths[:, 1:] = np.where(present, trees.depths[picked], 1)
        parents = _parent_nodes(trees, columns)
        for node in range(1, num_nodes):
            ancestors[:, node] |= ancestors[rows, parents[:, node]]
        for node in range(num_nodes - 1, 0, -1):
            kept = rows[present[:, node - 1]]
            parent = parents[kept, node]
            next_sibling[kept, node] = first_child[kept, parent]
            first_child[kept, parent] = node
    return PackedTrees(
        tokens=tokens,
        depths=depths,
        ancestors=ancestors,
        first_child=first_child,
        next_sibling=next_sibling,
        num_draft_tokens=1 + present.sum(axis=1),
        num_steps=int(depths.max(initial=0)),
    )


def _parent_nodes(trees: CandidateTrees, columns: IntArray) -> IntArray:
    # [B, M] node index of each node's parent; 0 for the root and for padding.
    rows = np.arange(len(columns))[:, None]
    nodes = np.arange(1, columns.shape[1] + 1)
    new_index = np.zeros((len(columns), trees.num_nodes + 1), np.int64)
    new_index[rows, columns] = nodes  # padding, column -1, writes the last element
    new_index[:, NO_NODE] = 0  # where the children of the root look
    parents = new_index[rows, trees.parents[rows, columns]]
    root = np.zeros((len(columns), 1), np.int64)
    return np.concatenate([root, np.where(columns == NO_NODE, 0, parents)], axis=1)


def flat_mask(packed: PackedTrees, prefix_lens: IntArray | None, device: str) -> Tensor:
    """The attention mask in one of SGLang's two layouts.

    Args:
        packed: B trees of M nodes.
        prefix_lens: [B] int64, cached tokens before each root, for rows over prefix and tree; None
            for rows over the tree alone.
        device: Where it goes.

    Returns:
        Flat bool, B blocks of M rows: each of M elements, or of prefix + M.
    """
    trees = torch.from_numpy(packed.ancestors).to(device)
    if prefix_lens is None:
        return trees.flatten()
    blocks = [
        torch.cat([tree.new_ones((len(tree), int(prefix_len))), tree], dim=1).flatten()
        for tree, prefix_len in zip(trees, prefix_lens, strict=True)
    ]
    return torch.cat(blocks)
