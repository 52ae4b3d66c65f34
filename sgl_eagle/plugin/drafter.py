"""Draft trees grown through SGLang's draft model, one level at a time, as the policy asks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgl_eagle.plugin import compat
from sgl_eagle_harness.types import NO_NODE, BoolArray, Children, IntArray


class ServerDrafter:
    """Implements `sgl_eagle_harness.draft_loop.Drafter` for the running batch.

    A draft step runs `topk` branches a request, the server's upper limit; branch t owns one slot
    of the key-value cache for each step. A node reads its own branch only, so before a step each
    branch receives the entries of its node's ancestors: drafts follow their true parents.

    Each level is copied to the host once, where the policy decides: one synchronisation a level.

    Attributes:
        num_invalid_rows: Rows without a finite draft probability so far; they draft nothing.
    """

    def __init__(self, draft_worker: Any, batch: Any, speculating: BoolArray) -> None:
        """Start at the roots.

        Args:
            draft_worker: SGLang's draft worker.
            batch: The running batch of B requests, with the latest draft input.
            speculating: [B] bool; other rows draft nothing.
        """
        self._worker = draft_worker
        self._batch = batch
        self._speculating = speculating
        self._branches = int(draft_worker.topk)
        self._step = 0
        self._forward_batch: Any = None
        self._hot_tokens = compat.hot_tokens(draft_worker)
        # The latest level: tokens [B, W * K], and hidden states [B, W, H] of its W parents.
        self._tokens = torch.empty(0)
        self._hidden: Tensor = batch.spec_info.hidden_states[:, None]
        self._slots = torch.empty(0)
        self.num_invalid_rows = 0

    def expand_root(self, topk: int) -> Children:
        """Children of the roots, which draft-extend has computed already.

        Args:
            topk: Children of each, at most the server's.

        Returns:
            [B, 1, topk].
        """
        draft_input = self._batch.spec_info
        log_probs = draft_input.topk_p[:, :topk].float().log()
        ids = draft_input.topk_index[:, :topk]
        return self._children(ids[:, None], log_probs[:, None], self._speculating[:, None])

    def expand(self, handles: IntArray, topk: int) -> Children:
        """Run one draft step.

        Args:
            handles: [B, W] int64, handles of nodes of the latest level; `NO_NODE` is padding.
            topk: Children of each.

        Returns:
            [B, W, topk].
        """
        num_rows, width = handles.shape
        valid = handles != NO_NODE
        nodes = np.zeros((num_rows, self._branches), np.int64)
        nodes[:, :width] = np.where(valid, handles, 0)
        parents = nodes // topk
        if self._forward_batch is None:
            self._plan()
        else:
            self._follow_parents(parents)
        rows = torch.arange(num_rows, device=self._tokens.device)[:, None]
        forward_batch = self._forward_batch
        forward_batch.input_ids = self._tokens[rows, self._to_device(nodes)].flatten()
        forward_batch.out_cache_loc = self._slots[:, :, self._step].flatten()
        hidden = self._hidden[rows, self._to_device(parents)]
        forward_batch.spec_info.hidden_states = hidden.flatten(0, 1)
        logits, hidden = compat.run_draft_step(self._worker, forward_batch, self._step)
        forward_batch.positions.add_(1)
        self._step += 1
        branches = (num_rows, self._branches)
        self._hidden = hidden.unflatten(0, branches)
        logits = logits.unflatten(0, branches)[:, :width].float()
        best, ids = logits.topk(topk, dim=-1)
        return self._children(ids, best - logits.logsumexp(-1, keepdim=True), valid)

    def _plan(self) -> None:
        """Slots and attention metadata of all steps that this round may run."""
        forward_batch = compat.prepare_draft_batch(self._worker, self._batch)
        self._worker.draft_attn_backend.init_forward_metadata(forward_batch)
        forward_batch.mark_forward_metadata_ready()
        num_steps = int(self._worker.speculative_num_steps)
        self._slots = forward_batch.out_cache_loc.view(-1, self._branches, num_steps)
        self._forward_batch = forward_batch

    def _follow_parents(self, parents: IntArray) -> None:
        moved = parents != np.arange(self._branches)
        if not moved.any():
            return
        rows, branches = (self._to_device(index) for index in np.nonzero(moved))
        sources = self._to_device(parents[moved])
        drafted = slice(0, self._step)
        compat.copy_cache_rows(
            self._worker.draft_runner,
            self._slots[rows, sources, drafted].flatten(),
            self._slots[rows, branches, drafted].flatten(),
        )

    def _children(self, ids: Tensor, log_probs: Tensor, expanded: BoolArray) -> Children:
        # [B, W, K] draft ids and log-probabilities, [B, W] bool.
        ids = ids if self._hot_tokens is None else self._hot_tokens[ids]
        num_rows, width, topk = ids.shape
        self._tokens = ids.reshape(num_rows, width * topk)
        host_log_probs = log_probs.cpu().numpy()
        usable = expanded & np.isfinite(host_log_probs).all(axis=2)
        self.num_invalid_rows += int((expanded & ~usable).any(axis=1).sum())
        shape = (num_rows, width, topk)
        return Children(
            tokens=ids.cpu().numpy(),
            log_probs=host_log_probs,
            handles=np.broadcast_to(np.arange(width * topk).reshape(width, topk), shape),
            valid=np.broadcast_to(usable[:, :, None], shape),
        )

    def _to_device(self, index: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(index)).to(self._tokens.device)
