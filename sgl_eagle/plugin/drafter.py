"""Draft trees grown through SGLang's draft model, one level at a time, as the policy asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_eagle.plugin.draft_steps import DraftSteps
from sgl_eagle.plugin.host_transfer import HostTransfer
from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle_harness.types import (
    NO_NODE,
    BoolArray,
    CandidateTrees,
    Children,
    Float32Array,
    IntArray,
)


class ServerDrafter(ABC):
    """Implements `sgl_eagle_harness.draft_loop.Drafter` for the running batch.

    A draft step runs `topk` branches a request, the server's upper limit; branch t owns one slot
    of the key-value cache for each step. Each level is copied to the host once, where the policy
    decides.

    Attributes:
        root_tokens: [B] int64, once `meet_roots` was called.
        context_len: [B] int64, cached tokens before each root; likewise.
    """

    root_tokens: IntArray
    context_len: IntArray

    def __init__(
        self,
        steps: DraftSteps,
        batch: Any,
        transfer: HostTransfer,
        clock: RoundClock,
        *,
        speculating: BoolArray,
        num_steps: int,
    ) -> None:
        """Begin with the roots, prepare draft steps, and wait for nothing.

        Args:
            steps: Runs draft steps.
            batch: The running batch of B requests, with the latest draft input.
            transfer: To and from the draft's device.
            clock: Takes the times.
            speculating: [B] bool, which requests draft.
            num_steps: Draft steps after that of the roots which the policy may ask for.
        """
        self._steps, self._transfer, self._clock = steps, transfer, clock
        self._speculating = speculating
        self._buffers = steps.start(batch)
        self._layout = self._buffers.layout
        if num_steps:
            steps.plan()

    def meet_roots(self) -> None:
        """Wait for the roots: for everything that the device had to do before this round."""
        self._first_mail = mail = self._receive(self._num_first)
        self.context_len = self._layout.lengths(mail).astype(np.int64)
        self.root_tokens = self._layout.roots(mail).astype(np.int64)

    def expand_root(self, topk: int) -> Children:
        """Children of the roots, which draft-extend has computed already.

        Args:
            topk: Children of each, at most the server's.

        Returns:
            [B, 1, topk].
        """
        roots = self._layout.level(self._first_mail, 0)[:, :, :1]
        return self._children(roots, topk, self._speculating[:, None])

    def foreseen_trees(self) -> CandidateTrees | None:
        """The finished trees, where the policy has nothing to decide; after `meet_roots`.

        Returns:
            What growing them level by level returns; None where the policy must be asked.
        """
        return None

    def _begin(self, num_steps: int) -> None:
        # The first mail tells of the roots and of so many draft steps.
        self._num_first = num_steps
        with self._clock.stage("draft"):
            self._steps.run_first(num_steps)
        self._post(num_steps)

    def _run(self, step: int) -> None:
        with self._clock.stage("draft"):
            self._steps.run(step)
        self._post(step + 1)

    def _post(self, num_steps: int) -> None:
        # Slot n of the transfer holds the mail as it is after n draft steps.
        with self._clock.stage("pack"):
            self._transfer.begin(num_steps, self._buffers.mail)

    def _receive(self, num_steps: int) -> npt.NDArray[np.int32]:
        with self._clock.stage("wait"):
            return self._transfer.wait(num_steps)

    @abstractmethod
    def expand(self, handles: IntArray, topk: int) -> Children:
        """Run one draft step.

        Args:
            handles: [B, W] int64, handles of nodes of the latest level; `NO_NODE` is padding.
            topk: Children of each.

        Returns:
            [B, W, topk].
        """

    def _children(self, level: npt.NDArray[np.int32], topk: int, expanded: BoolArray) -> Children:
        # [B, 2, W, T] int32 ids and bits of log-probabilities, [B, W] bool.
        tokens = level[:, 0, :, :topk].astype(np.int64)
        bits = np.ascontiguousarray(level[:, 1, :, :topk], np.int32)
        log_probs: Float32Array = bits.view(np.float32)
        usable = expanded & np.isfinite(log_probs).all(axis=2)
        handles = np.empty(tokens.shape, np.int64)
        handles[:] = np.arange(tokens.shape[1])[:, None] * self._layout.branches + np.arange(topk)
        valid = np.empty(tokens.shape, np.bool_)
        valid[:] = usable[:, :, None]
        return Children(tokens=tokens, log_probs=log_probs, handles=handles, valid=valid)


class StepwiseDrafter(ServerDrafter):
    """Waits for a level, then expands the nodes of it that the policy names, whichever they are."""

    def __init__(
        self,
        steps: DraftSteps,
        batch: Any,
        transfer: HostTransfer,
        clock: RoundClock,
        *,
        speculating: BoolArray,
        num_steps: int,
    ) -> None:
        """Begin with the roots, prepare draft steps, and wait for nothing.

        Args:
            steps: Runs draft steps on nodes that it is told.
            batch: The running batch of B requests, with the latest draft input.
            transfer: To and from the draft's device.
            clock: Takes the times.
            speculating: [B] bool, which requests draft.
            num_steps: Draft steps after that of the roots which the policy may ask for.
        """
        super().__init__(
            steps, batch, transfer, clock, speculating=speculating, num_steps=num_steps
        )
        self._num_expanded = 0
        self._begin(0)

    def expand(self, handles: IntArray, topk: int) -> Children:
        """Run one draft step.

        Args:
            handles: [B, W] int64, handles of nodes of the latest level; `NO_NODE` is padding.
            topk: Children of each.

        Returns:
            [B, W, topk].
        """
        valid = handles != NO_NODE
        width = handles.shape[1]
        choice = np.zeros(self._buffers.choice.shape, np.int64)
        choice[:, 0, :width] = np.where(valid, handles, 0)
        choice[:, 1] = choice[:, 0] // self._layout.branches
        self._transfer.send_into(self._num_expanded, self._buffers.choice, choice)
        self._run(self._num_expanded)
        self._num_expanded += 1
        mail = self._receive(self._num_expanded)
        level = self._layout.level(mail, self._num_expanded)
        return self._children(level[:, :, :width], topk, valid)
