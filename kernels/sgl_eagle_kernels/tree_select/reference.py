"""Selecting trees in plain torch: what the kernels must reproduce."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_eagle_kernels.lm_head.order import rank_keys
from sgl_eagle_kernels.tree_select.selection import SelectedTrees


def select_trees(
    prob: Tensor,
    parents: Tensor,
    depths: Tensor,
    root_positions: Tensor,
    sizes: Tensor,
    verify_price: Tensor,
    num_draft_tokens: int,
) -> SelectedTrees:
    """Take the best nodes of every request, as many as pay for their verification.

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
    device = prob.device
    most = min(num_draft_tokens - 1, num_nodes)
    order = rank_keys(prob, torch.arange(num_nodes, device=device)).topk(most, dim=-1).indices
    best = prob.gather(1, order).double()
    sums = torch.cat([best.new_zeros(num_rows, 1), best.cumsum(1)], dim=1)
    values = sums[:, (sizes - 1).clamp(max=most)] - verify_price
    wanted = sizes[values.argmax(dim=1)] - 1
    kept = (torch.arange(most, device=device) < wanted[:, None]) & (best > 0)
    columns = order.where(kept, num_nodes).sort(dim=1).values
    columns = torch.nn.functional.pad(columns, (0, num_draft_tokens - 1 - most), value=num_nodes)
    return _lay_out(columns, parents, depths, root_positions)


def _lay_out(
    columns: Tensor, parents: Tensor, depths: Tensor, root_positions: Tensor
) -> SelectedTrees:
    # columns: [B, M - 1] ascending, N for padding.
    num_rows, num_nodes = parents.shape
    real = columns < num_nodes
    picked = columns.clamp(max=num_nodes - 1)
    width = columns.shape[1] + 1
    nodes = torch.arange(1, width, device=columns.device).expand_as(columns)
    new_index = torch.zeros(num_rows, num_nodes + 1, dtype=torch.int64, device=columns.device)
    new_index.scatter_(1, columns, nodes)
    above = parents.gather(1, picked)
    parent = torch.where(real & (above >= 0), new_index.gather(1, above.clamp(min=0)), 0)
    root = parent.new_zeros(num_rows, 1)
    parent = torch.cat([root - 1, parent], dim=1)
    depth = torch.cat([root, depths[picked].where(real, 1)], dim=1)
    present = torch.cat([torch.ones_like(root, dtype=torch.bool), real], dim=1)
    index = torch.arange(width, device=columns.device)
    ancestors = torch.eye(width, dtype=torch.bool, device=columns.device).repeat(num_rows, 1, 1)
    for node in range(1, width):
        above_node = parent[:, node, None, None].expand(-1, 1, width)
        ancestors[:, node] |= ancestors.gather(1, above_node)[:, 0]
    # [B, i, j]: j is a child of i; [B, i, j]: j is a later child of i's parent.
    is_child = (parent[:, None, :] == index[None, :, None]) & present[:, None, :]
    later = (parent[:, None, :] == parent[:, :, None]) & (index[None, :] > index[:, None])
    later = later & present[:, None, :] & present[:, :, None]
    return SelectedTrees(
        num_draft_tokens=present.sum(dim=1),
        columns=torch.cat([root - 1, columns.where(real, -1)], dim=1),
        parents=parent,
        depths=depth,
        positions=root_positions[:, None] + depth,
        ancestors=ancestors,
        first_child=_lowest(is_child, index),
        next_sibling=_lowest(later, index),
        flat_index=(torch.arange(num_rows * width, device=columns.device)).view(num_rows, width),
    )


def _lowest(mask: Tensor, index: Tensor) -> Tensor:
    width = len(index)
    lowest = index.where(mask, width).amin(dim=-1)
    return lowest.where(lowest < width, -1)
