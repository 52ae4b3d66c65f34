"""Triton kernels of tree selection: one chooses nodes, one lays the tree out.

Of two launches, the first finds the best nodes without sorting all, and ranks only those.
"""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_eagle_kernels.lm_head._triton.order import key_of, order_of
from sgl_eagle_kernels.lm_head._triton.select import keep_top
from sgl_eagle_kernels.tree_select.selection import SelectedTrees


@triton.jit
def choose_nodes_kernel(
    prob_ptr,
    sizes_ptr,
    price_ptr,
    best_ptr,
    ranked_prob_ptr,
    node_ptr,
    columns_ptr,
    count_ptr,
    num_nodes,
    num_sizes,
    MOST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Rank one request's nodes, choose a size, and number the nodes kept in draft order."""
    row = tl.program_id(0).to(tl.int64)
    lowest: tl.constexpr = -0x80000000
    lane = tl.arange(0, BLOCK)
    inside = lane < num_nodes
    prob = tl.load(prob_ptr + row * num_nodes + lane, mask=inside, other=0.0)
    best, place, _ = keep_top(tl.where(inside, order_of(prob), lowest), MOST)
    tl.store(best_ptr + row * WIDTH + place, lane, mask=best)
    tl.store(node_ptr + row * num_nodes + lane, tl.zeros((BLOCK,), tl.int32), mask=inside)
    # Other threads of the same program read what was stored.
    tl.debug_barrier()
    slot = tl.arange(0, BLOCK_M)
    listed = slot < MOST
    column = tl.load(best_ptr + row * WIDTH + slot, mask=listed, other=0)
    prob = tl.load(prob_ptr + row * num_nodes + column, mask=listed, other=float("-inf"))
    key = tl.where(listed, key_of(prob, column), -0x8000000000000000)
    rank = tl.sum((key[None, :] > key[:, None]).to(tl.int32), axis=1)
    tl.store(ranked_prob_ptr + row * WIDTH + rank, prob, mask=listed)
    tl.debug_barrier()
    size_lane = tl.arange(0, BLOCK_S)
    on_offer = size_lane < num_sizes
    sizes = tl.load(sizes_ptr + size_lane, mask=on_offer, other=1)
    # NumPy adds from the best on; so does this loop, to the same bits.
    total = tl.zeros((), tl.float64)
    sums = tl.zeros((BLOCK_S,), tl.float64)
    for taken in range(MOST):
        total += tl.load(ranked_prob_ptr + row * WIDTH + taken).to(tl.float64)
        sums = tl.where(sizes - 1 > taken, total, sums)
    price = tl.load(price_ptr + row * num_sizes + size_lane, mask=on_offer, other=0.0)
    values = tl.where(on_offer, sums - price, float("-inf"))
    # The first of the best sizes: argmax may take any of equals.
    best_value = tl.max(values, axis=0)
    wanted = tl.min(tl.where(values == best_value, sizes, 0x7FFFFFFF), axis=0) - 1
    kept = listed & (rank < wanted) & (prob > 0.0)
    node = tl.cumsum(kept.to(tl.int32), axis=0)
    tl.store(node_ptr + row * num_nodes + column, node, mask=kept)
    tl.store(columns_ptr + row * WIDTH + node, column.to(tl.int64), mask=kept)
    count = tl.sum(kept.to(tl.int32), axis=0)
    empty = (slot < WIDTH) & ((slot == 0) | (slot > count))
    tl.store(columns_ptr + row * WIDTH + slot, tl.full((BLOCK_M,), -1, tl.int64), mask=empty)
    tl.store(count_ptr + row, (count + 1).to(tl.int64))


@triton.jit
def lay_out_kernel(
    columns_ptr,
    node_ptr,
    count_ptr,
    draft_parents_ptr,
    draft_depths_ptr,
    root_positions_ptr,
    parents_ptr,
    depths_ptr,
    positions_ptr,
    ancestors_ptr,
    first_child_ptr,
    next_sibling_ptr,
    flat_index_ptr,
    num_nodes,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Parents, depths, positions, attention mask and child links of one request's tree."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_M)
    inside = index < WIDTH
    at = row * WIDTH + index
    count = tl.load(count_ptr + row).to(tl.int32)
    present = index < count
    columns = tl.load(columns_ptr + at, mask=inside, other=-1)
    real = present & (columns >= 0)
    depth = tl.load(draft_depths_ptr + columns, mask=real, other=1)
    depth = tl.where(index == 0, 0, depth)
    ancestors = (index[:, None] == index[None, :]) | (index[None, :] == 0)
    parent = tl.zeros((BLOCK_M,), tl.int32)
    at_column = columns
    climbing = real
    step = 0
    # A tree of so many nodes is no deeper; the bound also ends the climb of parents that go round.
    while (tl.max(climbing.to(tl.int32), axis=0) > 0) & (step < WIDTH):
        at_column = tl.load(
            draft_parents_ptr + row * num_nodes + at_column, mask=climbing, other=-1
        )
        climbing = climbing & (at_column >= 0)
        node = tl.load(node_ptr + row * num_nodes + at_column, mask=climbing, other=0)
        parent = tl.where(step == 0, node, parent)
        ancestors = ancestors | (index[None, :] == node[:, None])
        step += 1
    parent = tl.where(index == 0, -1, parent)
    is_child = (parent[None, :] == index[:, None]) & present[None, :]
    first = tl.min(tl.where(is_child, index[None, :], BLOCK_M), axis=1)
    later = (parent[None, :] == parent[:, None]) & (index[None, :] > index[:, None])
    later = later & present[None, :] & present[:, None]
    following = tl.min(tl.where(later, index[None, :], BLOCK_M), axis=1)
    tl.store(parents_ptr + at, parent.to(tl.int64), mask=inside)
    tl.store(depths_ptr + at, depth, mask=inside)
    tl.store(positions_ptr + at, tl.load(root_positions_ptr + row) + depth, mask=inside)
    tl.store(first_child_ptr + at, tl.where(first < BLOCK_M, first, -1).to(tl.int64), mask=inside)
    tl.store(
        next_sibling_ptr + at,
        tl.where(following < BLOCK_M, following, -1).to(tl.int64),
        mask=inside,
    )
    tl.store(flat_index_ptr + at, at, mask=inside)
    tl.store(
        ancestors_ptr + at[:, None] * WIDTH + index[None, :],
        ancestors,
        mask=inside[:, None] & inside[None, :],
    )


def select_trees(
    prob: Tensor,
    parents: Tensor,
    depths: Tensor,
    root_positions: Tensor,
    sizes: Tensor,
    verify_price: Tensor,
    num_draft_tokens: int,
) -> SelectedTrees:
    """Take the best nodes of every request, in two launches.

    Args:
        prob: [B, N] float32.
        parents: [B, N] int64.
        depths: [N] int64.
        root_positions: [B] int64.
        sizes: [S] int64.
        verify_price: [B, S] float64.
        num_draft_tokens: M.

    Returns:
        The trees.
    """
    num_rows, num_nodes = prob.shape
    width = num_draft_tokens
    device = prob.device

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=device)

    trees = SelectedTrees(
        num_draft_tokens=empty(),
        columns=empty(width),
        parents=empty(width),
        depths=empty(width),
        positions=empty(width),
        ancestors=empty(width, width, dtype=torch.bool),
        first_child=empty(width),
        next_sibling=empty(width),
        flat_index=empty(width),
    )
    node = empty(num_nodes, dtype=torch.int32)
    best = empty(width, dtype=torch.int32)
    ranked_prob = empty(width, dtype=torch.float32)
    block_m = triton.next_power_of_2(width)
    choose_nodes_kernel[num_rows,](
        prob.contiguous(), sizes, verify_price.contiguous(), best, ranked_prob, node, trees.columns,
        trees.num_draft_tokens, num_nodes, len(sizes),
        MOST=min(width - 1, num_nodes),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(num_nodes),
        BLOCK_M=block_m,
        BLOCK_S=triton.next_power_of_2(len(sizes)),
        num_warps=4,
    )  # fmt: skip
    lay_out_kernel[num_rows,](
        trees.columns, node, trees.num_draft_tokens, parents.contiguous(), depths, root_positions,
        *trees[2:], num_nodes,
        WIDTH=width,
        BLOCK_M=block_m,
        num_warps=4,
    )  # fmt: skip
    return trees
