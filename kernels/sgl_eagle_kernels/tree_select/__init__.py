"""Which drafted nodes to verify at a price, and the arrays in which a target verifies them."""

from __future__ import annotations

from torch import Tensor

from sgl_eagle_kernels.tree_select import reference
from sgl_eagle_kernels.tree_select.selection import SelectedTrees

__all__ = ["SelectedTrees", "select_trees"]

MAX_NODES = 4096
MAX_SIZE = 128
"""Nodes of a verified tree; its attention mask is held on chip."""


def select_trees(
    prob: Tensor,
    parents: Tensor,
    depths: Tensor,
    root_positions: Tensor,
    *,
    sizes: Tensor,
    verify_price: Tensor,
    num_draft_tokens: int,
) -> SelectedTrees:
    """Take the best nodes of every request, as many as pay for their verification.

    Runs Triton kernels on CUDA and plain torch elsewhere; on CUDA it can be captured in a graph.

    Args:
        prob: [B, N] float32 acceptance probabilities in draft order, not rising from parent to
            child; 0 is padding or not worth verifying.
        parents: [B, N] int64 column of the parent, -1 for the root's children.
        depths: [N] int64, at least 1.
        root_positions: [B] int64 position of each root's token.
        sizes: [S] int64 ascending sizes on offer, root included, the first 1.
        verify_price: [B, S] float64 price of verifying each size, in tokens.
        num_draft_tokens: M, the largest of `sizes`; all outputs have this width.

    Returns:
        The trees; of equally good sizes the smallest.

    Raises:
        ValueError: If shapes do not fit or a limit is passed.
    """
    num_rows, num_nodes = prob.shape
    shapes = (tuple(parents.shape), tuple(depths.shape), tuple(root_positions.shape))
    if shapes != ((num_rows, num_nodes), (num_nodes,), (num_rows,)):
        raise ValueError(
            f"parents, depths and root_positions must be [{num_rows}, {num_nodes}], [{num_nodes}] "
            f"and [{num_rows}], got {shapes}"
        )
    if tuple(verify_price.shape) != (num_rows, len(sizes)):
        raise ValueError(
            f"verify_price must be [{num_rows}, {len(sizes)}], got {list(verify_price.shape)}"
        )
    if not 1 <= num_nodes <= MAX_NODES or not 2 <= num_draft_tokens <= MAX_SIZE:  # noqa: PLR2004
        raise ValueError(
            f"nodes must be in [1, {MAX_NODES}] and num_draft_tokens in [2, {MAX_SIZE}], got "
            f"{num_nodes} and {num_draft_tokens}"
        )
    arguments = (prob, parents, depths, root_positions, sizes, verify_price, num_draft_tokens)
    if prob.is_cuda:
        from sgl_eagle_kernels.tree_select._triton import select_trees as launch

        return launch(*arguments)
    return reference.select_trees(*arguments)
