"""Packs pruned trees into the arrays that SGLang verifies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from sgl_eagle.plugin.host_transfer import HostTransfer
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


def largest_tree(columns: IntArray) -> int:
    """Nodes of the largest of some trees.

    Args:
        columns: [B, C] int64 from `SpecPolicy.select_verify`.

    Returns:
        Its nodes, root included.
    """
    return 1 + int((columns != NO_NODE).sum(axis=1).max(initial=0))


def pack_trees(
    trees: CandidateTrees, columns: IntArray, num_nodes: int | None = None
) -> PackedTrees:
    """Lay out the selected nodes of all requests at once.

    Loops over depths and not over requests or nodes: a batch of 256 costs as many array operations
    as one.

    Args:
        trees: Drafted nodes of B requests; may be empty.
        columns: [B, C] int64 from `SpecPolicy.select_verify`.
        num_nodes: M, at least that of the largest tree; None takes the largest tree's.

    Returns:
        Trees of M nodes.
    """
    num_rows = len(columns)
    num_nodes = largest_tree(columns) if num_nodes is None else num_nodes
    shape = (num_rows, num_nodes)
    rows = np.arange(num_rows)[:, None]
    columns = _with_width(columns, num_nodes - 1)
    present = columns != NO_NODE
    tokens = np.zeros(shape, np.int64)
    depths = np.zeros(shape, np.int64)
    parents = np.zeros(shape, np.int64)
    ancestors = np.zeros((*shape, num_nodes), np.bool_)
    ancestors[:, np.arange(num_nodes), np.arange(num_nodes)] = True
    ancestors[:, :, 0] = True
    num_steps = 0
    if trees.num_nodes and num_nodes > 1:
        picked = np.where(present, columns, 0)
        tokens[:, 1:] = np.where(present, trees.tokens[rows, picked], 0)
        depths[:, 1:] = np.where(present, trees.depths[picked], 1)
        parents[:, 1:] = np.where(present, _parent_nodes(trees, columns), 0)
        num_steps = int(np.where(present, depths[:, 1:], 0).max(initial=0))
        nodes, above = np.arange(num_nodes), parents
        for _ in range(num_steps - 1):
            ancestors[rows, nodes, above] = True
            above = parents[rows, above]
    else:
        depths[:, 1:] = 1
    first_child, next_sibling = _links(parents, present)
    return PackedTrees(
        tokens=tokens,
        depths=depths,
        ancestors=ancestors,
        first_child=first_child,
        next_sibling=next_sibling,
        num_draft_tokens=1 + present.sum(axis=1),
        num_steps=num_steps,
    )


def _with_width(columns: IntArray, width: int) -> IntArray:
    # Padding is at the end of every row, so that whole columns of it may go or come.
    missing = width - columns.shape[1]
    if missing <= 0:
        return columns[:, :width]
    return np.pad(columns, ((0, 0), (0, missing)), constant_values=NO_NODE)


def _parent_nodes(trees: CandidateTrees, columns: IntArray) -> IntArray:
    # [B, M - 1] node index of each node's parent, 0 for the root; anything for padding.
    rows = np.arange(len(columns))[:, None]
    new_index = np.zeros((len(columns), trees.num_nodes + 1), np.int64)
    # Padding, column -1, writes the last element, which the next line takes back.
    new_index[rows, columns] = np.arange(1, columns.shape[1] + 1)
    new_index[:, NO_NODE] = 0  # where the children of the root look
    return new_index[rows, trees.parents[rows, columns]]


def _links(parents: IntArray, present: BoolArray) -> tuple[IntArray, IntArray]:
    """First child and next sibling of every node, in ascending order.

    Args:
        parents: [B, M] int64.
        present: [B, M - 1] bool, which of the nodes after the root are no padding.

    Returns:
        Two [B, M] int64, `NO_NODE` where there is none.
    """
    num_rows, num_nodes = parents.shape
    first_child = np.full((num_rows, num_nodes), NO_NODE)
    next_sibling = np.full((num_rows, num_nodes), NO_NODE)
    if num_nodes == 1:
        return first_child, next_sibling
    rows = np.arange(num_rows)[:, None]
    # Nodes after the root by parent, then by index; padding has a parent of its own, the last.
    keys = np.where(present, parents[:, 1:], num_nodes)
    order = np.argsort(keys, axis=1, kind="stable") + 1
    sorted_keys = np.sort(keys, axis=1)
    same = sorted_keys[:, 1:] == sorted_keys[:, :-1]
    real = sorted_keys < num_nodes
    sibling = np.where(same & real[:, 1:], order[:, 1:], NO_NODE)
    next_sibling[rows, order[:, :-1]] = sibling
    begins = real.copy()
    begins[:, 1:] &= ~same
    row_index, place = np.nonzero(begins)
    first_child[row_index, sorted_keys[row_index, place]] = order[row_index, place]
    return first_child, next_sibling


@dataclass(frozen=True, kw_only=True)
class TreeTensors:
    """Packed trees on the device, as SGLang's verification reads them.

    Attributes:
        numbers: [5, B, M] int64: tokens, positions, place of each node among all, first child and
            next sibling, the last two `NO_NODE` where there is none.
        mask: Flat, B blocks of M rows: each of M elements, or of prefix + M. May be longer.
    """

    numbers: Tensor
    mask: Tensor

    @cached_property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Views of `numbers`: tokens and positions, [B * M] each; the rest, [B, M] each.

        Kept, since trees that a graph lays out stand where those of the round before did.
        """
        tokens, positions, index, first_child, next_sibling = self.numbers.unbind(0)
        return tokens.view(-1), positions.view(-1), index, first_child, next_sibling


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskLayout:
    """How the target's attention reads the tree mask.

    Attributes:
        shows_prefix: Whether rows are over prefix and tree, or over the tree alone.
        buffer: Flat memory that the attention reads it from; None takes it from anywhere.
    """

    shows_prefix: bool
    buffer: Tensor | None


def send_trees(
    packed: PackedTrees,
    transfer: HostTransfer,
    *,
    root_tokens: IntArray,
    context_len: IntArray,
    layout: MaskLayout,
) -> TreeTensors:
    """Copy packed trees to the device in one piece, and write the attention mask there.

    Args:
        packed: B trees of M nodes.
        transfer: To the device.
        root_tokens: [B] int64.
        context_len: [B] int64, cached tokens before each root.
        layout: Of the mask.

    Returns:
        What SGLang verifies.
    """
    num_rows, num_nodes = packed.tokens.shape
    prefix = context_len if layout.shows_prefix else np.zeros(num_rows, np.int64)
    row_lens = prefix + num_nodes
    ends = np.cumsum(row_lens * num_nodes)
    numbers = np.empty((6, num_rows, num_nodes), np.int64)
    numbers[0] = packed.tokens
    numbers[0, :, 0] = root_tokens
    numbers[1] = context_len[:, None] + packed.depths
    numbers[2] = np.arange(num_rows * num_nodes).reshape(num_rows, num_nodes)
    numbers[3] = packed.first_child
    numbers[4] = packed.next_sibling
    # Where the part of each mask row that looks at the tree begins.
    numbers[5] = (ends - row_lens * num_nodes + prefix)[:, None]
    numbers[5] += row_lens[:, None] * np.arange(num_nodes)
    sent, ancestors = transfer.send([numbers, packed.ancestors])
    size = int(ends[-1]) if num_rows else 0
    buffer = layout.buffer
    mask = ancestors.new_empty(size) if buffer is None else buffer[:size]
    seen = ancestors.flatten().view(mask.dtype)  # a truth value is one byte, whatever the dtype
    if layout.shows_prefix:
        mask.fill_(1)
        places = sent[5, :, :, None] + _node_offsets(num_nodes, sent.device)
        mask.scatter_(0, places.flatten(), seen)
    else:
        mask.copy_(seen)
    return TreeTensors(numbers=sent[:5], mask=mask)


@cache
def _node_offsets(num_nodes: int, device: torch.device) -> Tensor:
    return torch.arange(num_nodes, device=device)
