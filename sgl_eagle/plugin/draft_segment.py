"""One draft step as one segment of device work: what runs between two decisions of the policy.

Letters: R requests, padding included; T branches a request (SGLang's topk), which is also the
number of children of a node; S draft steps; H the draft's hidden size. A policy narrower than the
server takes the first `topk` of a node's T children, and leaves the last branches idle.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from sgl_eagle.plugin import compat
from sgl_eagle.plugin.draft_head import run_step
from sgl_eagle.plugin.ranks import Ranks
from sgl_eagle.plugin.round_mail import RoundMail
from sgl_eagle_kernels import draft_mail
from sgl_eagle_kernels.tree_grow import IdentityCurve, grow_level


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBuffers:
    """What draft steps read and write; a captured graph knows it by address.

    Attributes:
        layout: Of `mail`.
        topk: Children of a node, and nodes of a frontier, that the policy may take; at most T.
        root_ids: [R, T] int64 draft ids of the roots' children, from draft-extend.
        root_probs: [R, T] float32 draft probabilities of them.
        bonus_tokens: [R] int64, the roots.
        mail: [R, layout.width] int32, what the host must know: lengths, roots, and all levels.
        tokens: [R, T * T] int64 target ids of the latest level.
        hidden: [R, T, H] hidden states of the nodes whose children the level is.
        choice: [R, 2, T] int64: the node of the level that each branch expands, and its parent
            among the nodes before.
        slots: [R, T, S] int64, cache slots of each branch.
        positions: [R * T] int64, position of the nodes that the next step expands.
        seq_lens: [R] int64, cached tokens before the root.
        pool_indices: [R] int64, rows of SGLang's table of slots.
        paths: [R, T] float32 path log-confidences of the nodes whose children the level is, as far
            as the device chose them; minus infinity is padding.
        widths: [R] int64, how many of these nodes the policy expanded: children of others are in
            no tree.
    """

    layout: RoundMail
    topk: int
    root_ids: Tensor
    root_probs: Tensor
    bonus_tokens: Tensor
    mail: Tensor
    tokens: Tensor
    hidden: Tensor
    choice: Tensor
    slots: Tensor
    positions: Tensor
    seq_lens: Tensor
    pool_indices: Tensor
    paths: Tensor
    widths: Tensor

    @classmethod
    def allocate(
        cls,
        *,
        num_rows: int,
        branches: int,
        topk: int,
        num_steps: int,
        hidden: tuple[int, torch.dtype, Any],
    ) -> DraftBuffers:
        """Buffers of zeros: slot 0 and request row 0 are SGLang's own padding.

        Args:
            num_rows: R.
            branches: T.
            topk: Children that the policy may take, at most T.
            num_steps: S.
            hidden: H, dtype and device of hidden states.

        Returns:
            The buffers.
        """
        width, dtype, device = hidden
        layout = RoundMail(branches=branches, num_steps=num_steps)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            layout=layout,
            topk=topk,
            root_ids=zeros(num_rows, branches),
            root_probs=zeros(num_rows, branches, dtype=torch.float32),
            bonus_tokens=zeros(num_rows),
            mail=zeros(num_rows, layout.width, dtype=torch.int32),
            tokens=zeros(num_rows, branches * branches),
            hidden=zeros(num_rows, branches, width, dtype=dtype),
            choice=zeros(num_rows, 2, branches),
            slots=zeros(num_rows, branches, num_steps),
            positions=zeros(num_rows * branches),
            seq_lens=zeros(num_rows),
            pool_indices=zeros(num_rows),
            paths=zeros(num_rows, branches, dtype=torch.float32),
            widths=zeros(num_rows),
        )

    @property
    def fit_kernels(self) -> bool:
        """Whether one kernel can make each choice that torch makes by many small ones."""
        return self.mail.is_cuda and self.topk <= draft_mail.MAX_TOPK

    def first(self, num_rows: int) -> DraftBuffers:
        """The first rows of each.

        Args:
            num_rows: How many.

        Returns:
            Views.
        """
        branches = self.slots.shape[1]
        tensors = [field.name for field in fields(self) if field.name not in {"layout", "topk"}]
        parts = {name: getattr(self, name)[:num_rows] for name in tensors}
        parts["positions"] = self.positions[: num_rows * branches]
        return DraftBuffers(layout=self.layout, topk=self.topk, **parts)


def choose_frontier(buffers: DraftBuffers, step: int) -> None:
    """Choose the most confident nodes of the level, as policies in `ConfidenceOrder` would.

    Sums are in float32 and equals go to the lowest column, so that it is the same choice to the
    bit. A node with a child of no finite probability has no children; children that a narrower
    policy does not take count for nothing.

    Args:
        buffers: R rows; `choice`, `paths` and the step's frontier are written.
        step: 0-based draft step that expands the nodes; before the first, the level is one node's.
    """
    layout, branches, topk = buffers.layout, buffers.layout.branches, buffers.topk
    if buffers.fit_kernels:
        draft_mail.choose_frontier(
            buffers.mail,
            buffers.paths,
            buffers.widths,
            buffers.choice,
            num_steps=layout.num_steps,
            topk=topk,
            step=step,
        )
        return
    num_parents = 1 if step == 0 else topk
    level = layout.level(buffers.mail, step)
    log_probs = level[:, 1, :num_parents, :topk].view(torch.float32)
    ranks = torch.arange(num_parents, device=log_probs.device)
    usable = log_probs.isfinite().all(-1) & (ranks < buffers.widths[:, None])
    paths = buffers.paths[:, :num_parents]
    grown = grow_level(
        paths,
        paths,  # acceptance, for which nobody asks here
        log_probs.where(usable[:, :, None], -torch.inf),
        calibration=IdentityCurve(),
        width=topk,
    )
    frontier = grown.frontier
    if topk < branches:  # from columns of topk children a node to those of the level
        frontier = (frontier // topk * branches + frontier % topk).clamp(min=-1)
    nodes = frontier.clamp(min=0)
    buffers.choice[:, 0, :topk].copy_(nodes)
    buffers.choice[:, 1, :topk].copy_(nodes // branches)
    buffers.paths[:, :topk].copy_(grown.frontier_path)
    layout.frontier(buffers.mail, step)[:, :topk].copy_(frontier)


def run_segment(worker: Any, forward_batch: Any, buffers: DraftBuffers, step: int) -> None:
    """Expand one node a branch and write the children to `buffers.mail`.

    A node reads its own branch only, so each branch first receives the cache entries of its node's
    ancestors: drafts follow their true parents.

    Args:
        worker: SGLang's draft worker, its attention metadata planned for all steps.
        forward_batch: SGLang's batch of R * T rows; its positions are those of `buffers`.
        buffers: R rows; tokens, hidden states and positions are moved on to the new level.
        step: 0-based draft step.
    """
    nodes, parents = buffers.choice.unbind(1)
    num_rows, branches = nodes.shape
    if step > 0:
        drafted = buffers.slots[:, :, :step]
        sources = drafted.gather(1, parents[:, :, None].expand_as(drafted))
        compat.copy_cache_rows(worker.draft_runner, sources.flatten(), drafted.flatten())
    forward_batch.input_ids = buffers.tokens.gather(1, nodes).flatten()
    forward_batch.out_cache_loc = buffers.slots[:, :, step].flatten()
    chosen = parents[:, :, None].expand_as(buffers.hidden)
    forward_batch.spec_info.hidden_states = buffers.hidden.gather(1, chosen).flatten(0, 1)
    log_probs, ids, hidden = run_step(worker, forward_batch, step, branches)
    _write_level(worker, buffers, step + 1, ids, log_probs)
    buffers.hidden.copy_(hidden.view(num_rows, branches, -1))
    buffers.positions.add_(1)


def read_batch(buffers: DraftBuffers, batch: Any) -> None:
    """Take over what the rounds before have left of a batch.

    Args:
        buffers: B rows.
        batch: SGLang's running batch of B requests, with the latest draft input.
    """
    draft_input = batch.spec_info
    pairs = (
        (buffers.root_ids, draft_input.topk_index),
        (buffers.root_probs, draft_input.topk_p),
        (buffers.bonus_tokens, draft_input.bonus_tokens),
        (buffers.hidden[:, 0], draft_input.hidden_states),
        (buffers.seq_lens, batch.seq_lens),
        (buffers.pool_indices, batch.req_pool_indices),
    )
    torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def place_roots(buffers: DraftBuffers) -> None:
    """Let the first draft step stand right behind the roots; attention is planned from there.

    Args:
        buffers: R rows with their lengths.
    """
    branches = buffers.layout.branches
    buffers.positions.view(-1, branches).copy_(buffers.seq_lens[:, None].expand(-1, branches))


def find_slots(worker: Any, buffers: DraftBuffers) -> None:
    """Find the slots of all branches, as SGLang lays them out behind a request's prefix.

    Args:
        worker: SGLang's draft worker.
        buffers: R rows that `read_batch` has filled.
    """
    _, branches, num_steps = buffers.slots.shape
    table = compat.token_table(worker)
    columns = torch.arange(branches * num_steps, device=table.device)
    columns = buffers.seq_lens[:, None] + columns
    buffers.slots.copy_(table[buffers.pool_indices[:, None], columns].view(buffers.slots.shape))


def start_round(worker: Any, buffers: DraftBuffers) -> None:
    """Make the roots' children the first level, and find the slots of all branches.

    Args:
        worker: SGLang's draft worker.
        buffers: R rows that `read_batch` has filled.
    """
    find_slots(worker, buffers)
    _write_level(worker, buffers, 0, buffers.root_ids, buffers.root_probs.log())
    buffers.layout.lengths(buffers.mail).copy_(buffers.seq_lens)
    buffers.layout.roots(buffers.mail).copy_(buffers.bonus_tokens)
    buffers.layout.frontiers(buffers.mail).fill_(-1)  # of a step that does not run, all padding
    buffers.paths.zero_()
    buffers.widths.fill_(buffers.layout.branches)


def _write_level(
    worker: Any, buffers: DraftBuffers, index: int, ids: Tensor, log_probs: Tensor
) -> None:
    # [R * W, T] draft ids and float32 log-probabilities; W is T, or 1 for the roots.
    level = buffers.layout.level(buffers.mail, index)
    num_rows, _, _, branches = level.shape
    ids = _target_ids(worker, ids).reshape(num_rows, -1, branches)
    log_probs = log_probs.reshape(num_rows, -1, branches)
    width = ids.shape[1]
    level[:, 0, :width].copy_(ids)
    level[:, 1, :width].copy_(log_probs.contiguous().view(torch.int32))
    # From here on all ranks have the same scores: what they choose from them is the same too.
    Ranks(compat.tensor_parallel_group()).share_tensor(buffers.mail)
    buffers.tokens[:, : width * branches].copy_(level[:, 0, :width].flatten(1))


def _target_ids(worker: Any, ids: Tensor) -> Tensor:
    hot_tokens = compat.hot_tokens(worker)
    return ids if hot_tokens is None else hot_tokens[ids]
