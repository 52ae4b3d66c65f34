"""Verified trees made where they were drafted, for policies that have nothing to decide.

Where a policy always takes the same draft steps and always verifies the most confident nodes, the
host need not see a tree before the target does: the device lays it out to the bit as the host
would.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_eagle.plugin.draft_segment import DraftBuffers
from sgl_eagle.plugin.verify_input import MaskLayout, TreeTensors
from sgl_eagle_kernels import draft_mail
from sgl_eagle_kernels.tree_select import MAX_SIZE, select_trees

_LARGEST_FINITE = 0x7F7FFFFF
"""Bits of the largest float32."""


def empty_trees(buffers: DraftBuffers, num_draft_tokens: int, layout: MaskLayout) -> TreeTensors:
    """Room for trees.

    Args:
        buffers: R rows.
        num_draft_tokens: M.
        layout: Of the mask; rows over the prefix need its buffer.

    Returns:
        R trees of M nodes, not written yet.
    """
    num_rows, device = len(buffers.mail), buffers.mail.device
    mask = layout.buffer
    if mask is None:
        size = num_rows * num_draft_tokens**2
        mask = torch.empty(size, dtype=torch.bool, device=device)
    shape = (5, num_rows, num_draft_tokens)
    return TreeTensors(numbers=torch.zeros(shape, dtype=torch.int64, device=device), mask=mask)


def write_trees(buffers: DraftBuffers, out: TreeTensors, *, shows_prefix: bool) -> None:
    """Rank all drafted nodes, and write the trees of the best to where the target looks for them.

    Args:
        buffers: R rows, after the draft steps of the round; those that did not run left no node.
        out: Trees of R requests and M nodes; numbers and mask are written.
        shows_prefix: Whether rows of the mask are over prefix and tree, or over the tree alone.
    """
    mail = buffers.mail
    num_rows, num_draft_tokens = out.numbers.shape[1:]
    if buffers.fit_kernels and num_draft_tokens <= MAX_SIZE:
        draft_mail.write_trees(
            mail,
            buffers.seq_lens,
            out.numbers,
            out.mask,
            num_steps=buffers.layout.num_steps,
            topk=buffers.topk,
            branches=buffers.layout.branches,
            shows_prefix=shows_prefix,
        )
        return
    tokens, paths, parents, depths = _all_nodes(buffers)
    # Reversed bits of a magnitude are a probability in the same order, ties included.
    magnitude = paths.abs().view(torch.int32)
    rank = (_LARGEST_FINITE - magnitude).view(torch.float32).where(paths > -torch.inf, 0.0)
    two = torch.arange(2, device=mail.device)
    selected = select_trees(
        rank,
        parents,
        depths,
        buffers.seq_lens,
        sizes=1 + two * (num_draft_tokens - 1),
        # The root alone has a price and the whole tree has none, so that it wins whatever it holds.
        verify_price=(1.0 - two.double()).repeat(num_rows, 1),
        num_draft_tokens=num_draft_tokens,
    )
    picked = tokens.gather(1, selected.columns.clamp(min=0)).where(selected.columns >= 0, 0)
    picked[:, 0] = buffers.layout.roots(mail)
    numbers = (
        picked,
        selected.positions,
        selected.flat_index,
        selected.first_child,
        selected.next_sibling,
    )
    torch.stack(numbers, out=out.numbers)
    _write_mask(out.mask, selected.ancestors, buffers.seq_lens if shows_prefix else None)


def _all_nodes(buffers: DraftBuffers) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # [R, N] tokens, path log-confidences (minus infinity where invalid) and parents; [N] depths.
    mail, layout, topk = buffers.mail, buffers.layout, buffers.topk
    tokens: list[Tensor] = []
    paths: list[Tensor] = []
    parents: list[Tensor] = []
    start = 0
    for index in range(layout.num_steps):
        level = layout.level(mail, index)[:, :, :topk, :topk]
        level = level[:, :, :1] if index == 0 else level
        log_probs = level[:, 1].view(torch.float32)
        usable = log_probs.isfinite().all(-1, keepdim=True)
        if index == 0:
            above = torch.zeros_like(log_probs[:, :, 0])
            columns = torch.full_like(above, -1, dtype=torch.int64)
        else:
            frontier = layout.frontier(mail, index - 1)[:, :topk].long()
            if topk < layout.branches:
                inside = frontier // layout.branches * topk + frontier % layout.branches
                frontier = inside.where(frontier >= 0, -1)
            usable = usable & (frontier >= 0)[:, :, None]
            above = paths[-1].gather(1, frontier.clamp(min=0))
            columns = frontier + start
            start += paths[-1].shape[1]
        path = (above[:, :, None] + log_probs).where(usable, -torch.inf)
        tokens.append(level[:, 0].flatten(1))
        paths.append(path.flatten(1))
        parents.append(columns[:, :, None].expand(-1, -1, topk).flatten(1))
    sizes = [path.shape[1] for path in paths]
    depths = torch.cat(
        [torch.full((size,), depth, device=mail.device) for depth, size in enumerate(sizes, 1)]
    )
    return torch.cat(tokens, 1).long(), torch.cat(paths, 1), torch.cat(parents, 1), depths


def _write_mask(mask: Tensor, ancestors: Tensor, lengths: Tensor | None) -> None:
    num_nodes = ancestors.shape[1]
    seen = ancestors.flatten().view(torch.uint8).view(mask.dtype)
    if lengths is None:
        mask[: len(seen)].copy_(seen)
        return
    row_lens = lengths + num_nodes
    starts = (row_lens * num_nodes).cumsum(0) - row_lens * num_nodes + lengths
    nodes = torch.arange(num_nodes, device=mask.device)
    places = starts[:, None, None] + row_lens[:, None, None] * nodes[:, None] + nodes
    mask.fill_(1)
    mask.scatter_(0, places.flatten(), seen)
