"""Choices that a drafting device makes by itself, each in one launch: what to expand and verify.

A chain of small operations says the same (`sgl_eagle.plugin.draft_segment.choose_frontier` and
`sgl_eagle.plugin.device_trees.write_trees`); each of them takes a launch.

Letters: R requests; T branches of a level, which is also the number of children of a node; S
levels; K children of a node, and nodes of a level, that the policy takes; M nodes verified. A row
of mail is [length, root, levels, frontiers]: a level is T * T ids and then as many float32
log-probabilities' bits, a frontier is T nodes of the level before.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["MAX_TOPK", "choose_frontier", "write_trees"]

MAX_TOPK = 8
"""K for which all pairs of nodes of two levels are held on chip."""


def choose_frontier(
    mail: Tensor,
    paths: Tensor,
    widths: Tensor,
    choice: Tensor,
    *,
    num_steps: int,
    topk: int,
    step: int,
) -> None:
    """Choose the most confident nodes of a level; equals go to the lowest column.

    Args:
        mail: [R, W] int32 on CUDA; the step's frontier is written.
        paths: [R, T] float32 path log-confidences of the level's parents; those of its chosen
            nodes are written.
        widths: [R] int64, parents that count.
        choice: [R, 2, T] int64; the chosen nodes and their parents among the nodes before are
            written.
        num_steps: S.
        topk: K, at most T and `MAX_TOPK`.
        step: 0-based draft step that expands the nodes; before the first, the level is one node's.
    """
    from sgl_eagle_kernels.draft_mail._triton import choose_frontier as launch

    launch(mail, paths, widths, choice, num_steps, topk, step)


def write_trees(
    mail: Tensor, lengths: Tensor, numbers: Tensor, mask: Tensor, *, num_steps: int, topk: int,
    branches: int, shows_prefix: bool,
) -> None:  # fmt: skip
    """Rank all drafted nodes, and lay out the trees of the most confident.

    Args:
        mail: [R, W] int32 on CUDA, after all draft steps.
        lengths: [R] int64, cached tokens before each root.
        numbers: [5, R, M] int64, written: tokens, positions, place of each node among all, first
            child and next sibling.
        mask: Flat, of one-byte elements, written: R blocks of M rows.
        num_steps: S.
        topk: K, at most T and `MAX_TOPK`.
        branches: T.
        shows_prefix: Whether rows of the mask are over prefix and tree, or over the tree alone.
    """
    from sgl_eagle_kernels.draft_mail._triton import write_trees as launch

    launch(mail, lengths, numbers, mask, num_steps, topk, branches, shows_prefix)
