"""Draft trees grown through SGLang's draft model, one level at a time, as the policy asks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sgl_eagle.plugin import compat, compat_graphs
from sgl_eagle.plugin.draft_graphs import DraftGraphs
from sgl_eagle.plugin.draft_segment import DraftBuffers, run_segment, write_roots
from sgl_eagle.plugin.host_transfer import HostTransfer
from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle_harness.types import NO_NODE, BoolArray, Children, Float32Array, IntArray


class ServerDrafter:
    """Implements `sgl_eagle_harness.draft_loop.Drafter` for the running batch.

    A draft step runs `topk` branches a request, the server's upper limit; branch t owns one slot
    of the key-value cache for each step. Each level is copied to the host once, where the policy
    decides: one synchronisation a level, and one for the roots, which brings the lengths along.

    Attributes:
        context_len: [B] int64, cached tokens before each root.
        num_invalid_rows: Rows without a finite draft probability so far; they draft nothing.
    """

    def __init__(
        self,
        draft_worker: Any,
        batch: Any,
        graphs: DraftGraphs | None,
        transfer: HostTransfer,
        clock: RoundClock,
        *,
        plan_ahead: bool,
    ) -> None:
        """Start at the roots.

        Args:
            draft_worker: SGLang's draft worker.
            batch: The running batch of B requests, with the latest draft input.
            graphs: Captured draft steps; None runs them one kernel at a time.
            transfer: To and from the draft's device.
            clock: Counts draft steps.
            plan_ahead: Whether draft steps are likely: their batch is then prepared while the
                device still works on the round before.
        """
        self._worker = draft_worker
        self._batch = batch
        self._transfer = transfer
        self._clock = clock
        self._num_rows = len(batch.seq_lens)
        self._branches = int(draft_worker.topk)
        self._step = 0
        self._forward_batch: Any = None
        self._graphs = graphs if graphs is not None and graphs.fits(self._num_rows) else None
        self._graph_size = 0
        self._buffers = self._allocate() if self._graphs is None else self._graphs.buffers
        self._speculating: BoolArray = np.ones(self._num_rows, np.bool_)
        self.num_invalid_rows = 0
        write_roots(draft_worker, self._buffers, batch.spec_info)
        if plan_ahead:
            self._plan()
        roots = self._buffers.level[: self._num_rows, :, 0].flatten(1)
        lengths = batch.seq_lens.to(torch.int32)[:, None]
        fetched = transfer.fetch(torch.cat([roots, lengths], dim=1))
        self._roots = np.ascontiguousarray(fetched[:, :-1]).reshape(-1, 2, 1, self._branches)
        self.context_len: IntArray = fetched[:, -1].astype(np.int64)

    def speculate(self, rows: BoolArray) -> None:
        """Say which requests draft, before the first level is asked for.

        Args:
            rows: [B] bool.
        """
        self._speculating = rows

    def expand_root(self, topk: int) -> Children:
        """Children of the roots.

        Args:
            topk: Children of each, at most the server's.

        Returns:
            [B, 1, topk].
        """
        return self._children(self._roots, topk, self._speculating[:, None])

    def expand(self, handles: IntArray, topk: int) -> Children:
        """Run one draft step.

        Args:
            handles: [B, W] int64, handles of nodes of the latest level; `NO_NODE` is padding.
            topk: Children of each.

        Returns:
            [B, W, topk].
        """
        width = handles.shape[1]
        valid = handles != NO_NODE
        with self._clock.stage("draft"):
            level = self._run_step(np.where(valid, handles, 0))
        return self._children(level[:, :, :width], topk, valid)

    def _run_step(self, nodes: IntArray) -> IntArray:
        # [B, W] nodes of the latest level; returns [B, 2, T, T] int32.
        choice = np.zeros((self._num_rows, 2, self._branches), np.int64)
        choice[:, 0, : nodes.shape[1]] = nodes
        choice[:, 1] = choice[:, 0] // self._branches
        if self._forward_batch is None:
            self._plan()
        rows = self._buffers.first(self._num_rows)
        rows.choice.copy_(self._transfer.send([choice])[0])
        if self._graphs is None:
            run_segment(self._worker, self._forward_batch, rows, self._step)
        else:
            self._graphs.replay(self._graph_size, self._step)
        self._step += 1
        return self._transfer.fetch(rows.level)

    def _allocate(self) -> DraftBuffers:
        return DraftBuffers.allocate(
            num_rows=self._num_rows,
            branches=self._branches,
            num_steps=int(self._worker.speculative_num_steps),
            hidden=compat_graphs.draft_hidden_states(self._worker),
        )

    def _plan(self) -> None:
        """Slots and attention metadata of all steps that this round may run."""
        self._forward_batch = forward_batch = compat.prepare_draft_batch(self._worker, self._batch)
        if self._graphs is not None:
            self._graph_size = self._graphs.load(forward_batch)
            return
        self._worker.draft_attn_backend.init_forward_metadata(forward_batch)
        forward_batch.mark_forward_metadata_ready()
        self._buffers.slots.copy_(forward_batch.out_cache_loc.view(self._buffers.slots.shape))
        self._buffers.positions.copy_(forward_batch.positions)
        forward_batch.positions = self._buffers.positions

    def _children(self, level: IntArray, topk: int, expanded: BoolArray) -> Children:
        # [B, 2, W, T] int32 ids and bits of log-probabilities, [B, W] bool.
        tokens = level[:, 0, :, :topk].astype(np.int64)
        bits = np.ascontiguousarray(level[:, 1, :, :topk], np.int32)
        log_probs: Float32Array = bits.view(np.float32)
        usable = expanded & np.isfinite(log_probs).all(axis=2)
        self.num_invalid_rows += int((expanded & ~usable).any(axis=1).sum())
        names = np.arange(tokens.shape[1])[:, None] * self._branches + np.arange(topk)
        return Children(
            tokens=tokens,
            log_probs=log_probs,
            handles=np.broadcast_to(names, tokens.shape),
            valid=np.broadcast_to(usable[:, :, None], tokens.shape),
        )
