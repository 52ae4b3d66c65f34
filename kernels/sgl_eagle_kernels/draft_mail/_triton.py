"""Triton kernels of choices made from mail: one program a request."""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_eagle_kernels.lm_head._triton.order import id_of, key_of
from sgl_eagle_kernels.lm_head._triton.select import count_up_to, keep_top

_INFINITE = tl.constexpr(0x7F800000)
"""Exponent bits of the float32 numbers that are not finite."""
_USUAL_ROWS = 256
"""Batches of at most so many requests share one compiled kernel for trees of a size. A server
captures graphs of many batch sizes, and to compile the kernel for each takes a minute at the first
start on a machine."""


@triton.jit
def _load_steps(log_probs_ptr, branch, child, inside, BRANCHES: tl.constexpr, TOPK: tl.constexpr):
    """[BLOCK] float32 log-probabilities, and whether all siblings of each are finite."""
    at = log_probs_ptr + branch * BRANCHES
    usable = inside
    for sibling in tl.static_range(TOPK):
        bits = tl.load(at + sibling, mask=inside, other=0)
        usable = usable & ((bits & _INFINITE) != _INFINITE)
    bits = tl.load(at + child, mask=usable, other=0)
    return bits.to(tl.float32, bitcast=True), usable


@triton.jit
def choose_frontier_kernel(
    mail_ptr,
    paths_ptr,
    widths_ptr,
    choice_ptr,
    stride_mail_row,
    log_probs_at,
    frontier_at,
    NUM_PARENTS: tl.constexpr,
    BRANCHES: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best nodes of one level of one request."""
    row = tl.program_id(0).to(tl.int64)
    mail_ptr += row * stride_mail_row
    paths_ptr += row * BRANCHES
    choice_ptr += row * 2 * BRANCHES
    lane = tl.arange(0, BLOCK)
    parent = lane // TOPK
    inside = (lane < NUM_PARENTS * TOPK) & (parent < tl.load(widths_ptr + row))
    step, usable = _load_steps(mail_ptr + log_probs_at, parent, lane % TOPK, inside, BRANCHES, TOPK)
    above = tl.load(paths_ptr + parent, mask=usable, other=float("-inf"))
    path = tl.where(usable, above + step, float("-inf"))
    keys = tl.where(lane < NUM_PARENTS * TOPK, key_of(path, lane), -0x8000000000000000)
    for rank in tl.static_range(TOPK):
        best = tl.max(keys, axis=0)
        best_path = tl.max(tl.where(keys == best, path, float("-inf")), axis=0)
        found = best_path > float("-inf")
        column = tl.where(found, id_of(best), 0)
        node = column // TOPK * BRANCHES + column % TOPK
        tl.store(mail_ptr + frontier_at + rank, tl.where(found, node, -1).to(tl.int32))
        tl.store(choice_ptr + rank, node)
        tl.store(choice_ptr + BRANCHES + rank, node // BRANCHES)
        # All lanes have read the paths of before: the maximum is over what they have read.
        tl.store(paths_ptr + rank, best_path)
        keys = tl.where(keys == best, -0x8000000000000000, keys)


@triton.jit
def _parent_in_level(node, BRANCHES: tl.constexpr, TOPK: tl.constexpr):
    """Where a node of a frontier stands among those that the policy takes; padding is anywhere."""
    known = tl.maximum(node, 0)
    return known // BRANCHES * TOPK + known % BRANCHES


@triton.jit
def _write_paths(
    mail_ptr,
    path_ptr,
    FRONTIERS_AT: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    BRANCHES: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Path log-confidences of all nodes of one request, minus infinity where there is none."""
    lane = tl.arange(0, BLOCK)
    branch = lane // TOPK
    above = tl.zeros((BLOCK,), tl.float32)
    path = above
    for level in tl.static_range(NUM_STEPS):
        size = TOPK if level == 0 else TOPK * TOPK
        start = 0 if level == 0 else TOPK + (level - 1) * TOPK * TOPK
        inside = lane < size
        if level > 0:
            node = tl.load(
                mail_ptr + FRONTIERS_AT + (level - 1) * BRANCHES + branch, mask=inside, other=-1
            )
            is_parent = _parent_in_level(node, BRANCHES, TOPK)[:, None] == lane[None, :]
            above = tl.max(tl.where(is_parent, path[None, :], float("-inf")), axis=1)
            inside = inside & (node >= 0)
        log_probs_at = 2 + (2 * level + 1) * BRANCHES * BRANCHES
        step, usable = _load_steps(
            mail_ptr + log_probs_at, branch, lane % TOPK, inside, BRANCHES, TOPK
        )
        path = tl.where(usable, above + step, float("-inf"))
        tl.store(path_ptr + start + lane, path, mask=lane < size)


@triton.jit
def _keep_best(
    path_ptr,
    node_ptr,
    column_ptr,
    NUM_NODES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Number the nodes of the tree in draft order, 0 for those left out; return how many."""
    column = tl.arange(0, BLOCK)
    drafted = column < NUM_NODES
    path = tl.load(path_ptr + column, mask=drafted, other=float("-inf"))
    # As the chain of operations ranks them: by reversed bits of the magnitude.
    magnitude = path.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    order = tl.where(path > float("-inf"), 0x7F7FFFFF - magnitude, 0)
    most: tl.constexpr = NUM_NODES if NUM_NODES < WIDTH else WIDTH - 1
    kept, _, _ = keep_top(tl.where(drafted, order, -0x80000000), most)
    kept = kept & (order > 0)
    node = tl.where(kept, count_up_to(kept), 0)
    tl.store(node_ptr + column, node, mask=drafted)
    tl.store(column_ptr + node, column, mask=kept)
    return tl.sum(kept.to(tl.int32), axis=0)


@triton.jit
def _climb(
    mail_ptr,
    node_ptr,
    level,
    in_level,
    real,
    FRONTIERS_AT: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    BRANCHES: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[BLOCK] parents of nodes, 0 for the root, and [BLOCK, BLOCK] which nodes each attends to."""
    index = tl.arange(0, BLOCK)
    ancestors = (index[:, None] == index[None, :]) | (index[None, :] == 0)
    parent = tl.zeros((BLOCK,), tl.int32)
    for climbed in tl.static_range(NUM_STEPS - 1):
        # To the parent of the node, or of the ancestor that was reached.
        climbing = real & (level > 0)
        above = tl.load(
            mail_ptr + FRONTIERS_AT + (level - 1) * BRANCHES + in_level // TOPK,
            mask=climbing, other=0,
        )  # fmt: skip
        in_level = tl.where(climbing, _parent_in_level(above, BRANCHES, TOPK), in_level)
        level = tl.where(climbing, level - 1, level)
        column = tl.where(level == 0, in_level, TOPK + (level - 1) * TOPK * TOPK + in_level)
        node = tl.load(node_ptr + column, mask=climbing, other=0)
        if climbed == 0:
            parent = node
        ancestors = ancestors | (index[None, :] == node[:, None])
    return parent, ancestors


@triton.jit
def _link(parent, present, BLOCK: tl.constexpr):
    """[BLOCK] int64 first children and next siblings, -1 where there is none."""
    index = tl.arange(0, BLOCK)
    parent = tl.where(index == 0, -1, parent)
    is_child = (parent[None, :] == index[:, None]) & present[None, :]
    first = tl.min(tl.where(is_child, index[None, :], BLOCK), axis=1)
    later = (parent[None, :] == parent[:, None]) & (index[None, :] > index[:, None])
    later = later & present[None, :] & present[:, None]
    following = tl.min(tl.where(later, index[None, :], BLOCK), axis=1)
    first = tl.where(first < BLOCK, first, -1).to(tl.int64)
    return first, tl.where(following < BLOCK, following, -1).to(tl.int64)


@triton.jit(do_not_specialize=["stride_mail_row", "stride_numbers_kind"])
def write_trees_kernel(
    mail_ptr,
    lengths_ptr,
    numbers_ptr,
    mask_ptr,
    path_ptr,
    node_ptr,
    column_ptr,
    stride_mail_row,
    stride_numbers_kind,
    NUM_STEPS: tl.constexpr,
    BRANCHES: tl.constexpr,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    SHOWS_PREFIX: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Path confidences, the best nodes, and the tree of one request."""
    row = tl.program_id(0).to(tl.int64)
    square: tl.constexpr = TOPK * TOPK
    num_nodes: tl.constexpr = TOPK + (NUM_STEPS - 1) * square
    frontiers_at: tl.constexpr = 2 + NUM_STEPS * 2 * BRANCHES * BRANCHES
    mail_ptr += row * stride_mail_row
    path_ptr += row * num_nodes
    node_ptr += row * num_nodes
    column_ptr += row * WIDTH
    _write_paths(mail_ptr, path_ptr, frontiers_at, NUM_STEPS, BRANCHES, TOPK, BLOCK_L)
    # Other threads of the same program read what was stored.
    tl.debug_barrier()
    count = _keep_best(path_ptr, node_ptr, column_ptr, num_nodes, WIDTH, BLOCK_N)
    tl.debug_barrier()
    index = tl.arange(0, BLOCK_M)
    in_tree = index < WIDTH
    present = index <= count
    real = present & (index > 0)
    column = tl.load(column_ptr + index, mask=real, other=0)
    level = tl.where(column < TOPK, 0, 1 + (column - TOPK) // square)
    in_level = tl.where(column < TOPK, column, (column - TOPK) % square)
    at_token = 2 + level * 2 * BRANCHES * BRANCHES + in_level // TOPK * BRANCHES + in_level % TOPK
    token = tl.load(mail_ptr + tl.where(index == 0, 1, at_token), mask=real | (index == 0), other=0)
    depth = tl.where(index == 0, 0, tl.where(real, 1 + level, 1))
    parent, ancestors = _climb(
        mail_ptr, node_ptr, level, in_level, real, frontiers_at, NUM_STEPS, BRANCHES, TOPK, BLOCK_M
    )
    first_child, next_sibling = _link(parent, present, BLOCK_M)
    length = tl.load(lengths_ptr + row)
    numbers_ptr += row * WIDTH + index
    tl.store(numbers_ptr, token.to(tl.int64), mask=in_tree)
    tl.store(numbers_ptr + stride_numbers_kind, length + depth, mask=in_tree)
    tl.store(numbers_ptr + 2 * stride_numbers_kind, row * WIDTH + index, mask=in_tree)
    tl.store(numbers_ptr + 3 * stride_numbers_kind, first_child, mask=in_tree)
    tl.store(numbers_ptr + 4 * stride_numbers_kind, next_sibling, mask=in_tree)
    if SHOWS_PREFIX:
        other = tl.arange(0, BLOCK_R)
        before = tl.load(lengths_ptr + other, mask=other < row, other=0)
        before = tl.sum(tl.where(other < row, before + WIDTH, 0), axis=0)
        mask_at = before * WIDTH + index[:, None] * (length + WIDTH) + length + index[None, :]
    else:
        mask_at = row * WIDTH * WIDTH + index[:, None] * WIDTH + index[None, :]
    tl.store(mask_ptr + mask_at, ancestors.to(tl.uint8), mask=in_tree[:, None] & in_tree[None, :])


def choose_frontier(
    mail: Tensor,
    paths: Tensor,
    widths: Tensor,
    choice: Tensor,
    num_steps: int,
    topk: int,
    step: int,
) -> None:
    """Choose the best nodes of a level, in one launch.

    Args:
        mail: [R, W] int32.
        paths: [R, T] float32.
        widths: [R] int64.
        choice: [R, 2, T] int64.
        num_steps: S.
        topk: K.
        step: 0-based draft step.
    """
    num_rows, branches = paths.shape
    num_parents = 1 if step == 0 else topk
    square = branches * branches
    choose_frontier_kernel[num_rows,](
        mail, paths, widths, choice, mail.stride(0),
        2 + step * 2 * square + square,
        2 + num_steps * 2 * square + step * branches,
        NUM_PARENTS=num_parents,
        BRANCHES=branches,
        TOPK=topk,
        BLOCK=triton.next_power_of_2(num_parents * topk),
        num_warps=1,
    )  # fmt: skip


def write_trees(
    mail: Tensor,
    lengths: Tensor,
    numbers: Tensor,
    mask: Tensor,
    num_steps: int,
    topk: int,
    branches: int,
    shows_prefix: bool,
) -> None:
    """Write the trees of the best nodes, in one launch; two where the mask shows the prefix.

    Args:
        mail: [R, W] int32.
        lengths: [R] int64.
        numbers: [5, R, M] int64, contiguous.
        mask: Flat, of one-byte elements.
        num_steps: S.
        topk: K.
        branches: T.
        shows_prefix: Whether rows of the mask are over prefix and tree.
    """
    num_rows, width = numbers.shape[1:]
    num_nodes = topk + (num_steps - 1) * topk**2
    path = torch.empty(num_rows, num_nodes, dtype=torch.float32, device=mail.device)
    node = torch.empty(num_rows, num_nodes, dtype=torch.int32, device=mail.device)
    column = torch.empty(num_rows, width, dtype=torch.int32, device=mail.device)
    if shows_prefix:
        mask.fill_(1)
    write_trees_kernel[num_rows,](
        mail, lengths, numbers, mask.view(torch.uint8), path, node, column,
        mail.stride(0), numbers.stride(0),
        NUM_STEPS=num_steps,
        BRANCHES=branches,
        TOPK=topk,
        WIDTH=width,
        SHOWS_PREFIX=shows_prefix,
        BLOCK_L=triton.next_power_of_2(topk**2),
        BLOCK_N=triton.next_power_of_2(num_nodes),
        BLOCK_M=triton.next_power_of_2(width),
        BLOCK_R=triton.next_power_of_2(max(num_rows, _USUAL_ROWS)),
        num_warps=4,
    )  # fmt: skip
