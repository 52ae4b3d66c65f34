"""Verified trees of a batch, padded to one width."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SelectedTrees(NamedTuple):
    """Trees of B requests, padded to M nodes; node 0 of each is its root.

    A padding node sees itself and the root, and no link leads to it, so it can never be accepted.

    Attributes:
        num_draft_tokens: [B] int64 nodes of each tree, root included, padding excluded.
        columns: [B, M] int64 draft columns, ascending; -1 for the root and for padding.
        parents: [B, M] int64 node index of the parent; -1 for the root, 0 for padding.
        depths: [B, M] int64; 0 for the root, 1 for padding.
        positions: [B, M] int64 position of each token in its sequence.
        ancestors: [B, M, M] bool; row i marks the nodes that node i attends to.
        first_child: [B, M] int64 lowest child or -1 (SGLang: `retrive_next_token`).
        next_sibling: [B, M] int64 next higher child of the same parent or -1 (SGLang:
            `retrive_next_sibling`).
        flat_index: [B, M] int64 place of each node in the flattened batch (SGLang:
            `retrive_index`).
    """

    num_draft_tokens: Tensor
    columns: Tensor
    parents: Tensor
    depths: Tensor
    positions: Tensor
    ancestors: Tensor
    first_child: Tensor
    next_sibling: Tensor
    flat_index: Tensor
