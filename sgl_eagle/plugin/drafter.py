"""Draft trees grown through SGLang's draft model, one level at a time, as the policy asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sgl_eagle.plugin.draft_steps import DraftSteps
from sgl_eagle.plugin.host_transfer import HostTransfer
from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle_harness.types import NO_NODE, BoolArray, Children, Float32Array, IntArray


class ServerDrafter:
    """Implements `sgl_eagle_harness.draft_loop.Drafter` for the running batch.

    A draft step runs `topk` branches a request, the server's upper limit; branch t owns one slot
    of the key-value cache for each step. Each level is copied to the host once, where the policy
    decides: one synchronisation a level, and one for the roots, which brings along what else the
    host must know.

    Attributes:
        root_tokens: [B] int64.
        context_len: [B] int64, cached tokens before each root.
        num_invalid_rows: Rows without a finite draft probability so far; they draft nothing.
    """

    def __init__(
        self,
        steps: DraftSteps,
        batch: Any,
        transfer: HostTransfer,
        clock: RoundClock,
        *,
        plan_ahead: bool,
        before_wait: Callable[[], None] | None = None,
    ) -> None:
        """Start at the roots.

        Args:
            steps: Runs draft steps.
            batch: The running batch of B requests, with the latest draft input.
            transfer: To and from the draft's device.
            clock: Counts draft steps.
            plan_ahead: Whether draft steps are likely: they are then prepared while the device
                still works on the round before.
            before_wait: Called in that time too, if given.
        """
        self._steps = steps
        self._transfer = transfer
        self._clock = clock
        self._step = 0
        self._planned = plan_ahead
        self._buffers = steps.start(batch)
        if plan_ahead:
            steps.plan()
        if before_wait is not None:
            before_wait()
        self._branches = int(self._buffers.choice.shape[2])
        roots = transfer.fetch(self._buffers.roots)
        shape = (len(roots), 2, 1, self._branches)
        self._roots = np.ascontiguousarray(roots[:, :-2]).reshape(shape)
        self.context_len: IntArray = roots[:, -2].astype(np.int64)
        self.root_tokens: IntArray = roots[:, -1].astype(np.int64)
        self._speculating: BoolArray = np.ones(len(roots), np.bool_)
        self.num_invalid_rows = 0

    def speculate(self, rows: BoolArray) -> None:
        """Say which requests draft, before the first level is asked for.

        Args:
            rows: [B] bool.
        """
        self._speculating = rows

    def expand_root(self, topk: int) -> Children:
        """Children of the roots, which draft-extend has computed already.

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
        valid = handles != NO_NODE
        with self._clock.stage("draft"):
            level = self._run_step(np.where(valid, handles, 0))
        return self._children(level[:, :, : handles.shape[1]], topk, valid)

    def _run_step(self, nodes: IntArray) -> IntArray:
        # [B, W] nodes of the latest level; returns [B, 2, T, T] int32.
        choice = np.zeros(self._buffers.choice.shape, np.int64)
        choice[:, 0, : nodes.shape[1]] = nodes
        choice[:, 1] = choice[:, 0] // self._branches
        if not self._planned:
            self._planned = True
            self._steps.plan()
        self._transfer.send_into(self._buffers.choice, choice)
        self._steps.run(self._step)
        self._step += 1
        return self._transfer.fetch(self._buffers.level)

    def _children(self, level: IntArray, topk: int, expanded: BoolArray) -> Children:
        # [B, 2, W, T] int32 ids and bits of log-probabilities, [B, W] bool.
        tokens = level[:, 0, :, :topk].astype(np.int64)
        bits = np.ascontiguousarray(level[:, 1, :, :topk], np.int32)
        log_probs: Float32Array = bits.view(np.float32)
        usable = expanded & np.isfinite(log_probs).all(axis=2)
        self.num_invalid_rows += int((expanded & ~usable).any(axis=1).sum())
        handles = np.empty(tokens.shape, np.int64)
        handles[:] = np.arange(tokens.shape[1])[:, None] * self._branches + np.arange(topk)
        valid = np.empty(tokens.shape, np.bool_)
        valid[:] = usable[:, :, None]
        return Children(tokens=tokens, log_probs=log_probs, handles=handles, valid=valid)
