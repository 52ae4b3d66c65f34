"""Draft steps that run before the policy has asked for them, where it can be foreseen which.

A policy in `ConfidenceOrder` expands the first nodes of an order that the device knows too; it
decides how many, and when to stop. So while the host decides about one level, the device drafts
the next one from all the nodes that the policy could want. A stop wastes at most the step that
runs, and nodes that the policy does not want are left out of its tree: the trees are those that a
drafter which waits would return.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sgl_eagle.plugin.draft_steps import DraftSteps
from sgl_eagle.plugin.drafter import ServerDrafter
from sgl_eagle.plugin.foreseen_trees import assemble_trees
from sgl_eagle.plugin.host_transfer import HostTransfer
from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle_harness.policies.confidence_order import ConfidenceOrder
from sgl_eagle_harness.types import NO_NODE, BoolArray, CandidateTrees, Children, IntArray


class AheadDrafter(ServerDrafter):
    """Keeps one draft step ahead of the policy, or as many as it is certain to want."""

    def __init__(
        self,
        steps: DraftSteps,
        batch: Any,
        transfer: HostTransfer,
        clock: RoundClock,
        *,
        speculating: BoolArray,
        num_steps: int,
        order: ConfidenceOrder,
    ) -> None:
        """Begin with the roots and the first steps, and wait for nothing.

        Args:
            steps: Runs draft steps that choose their nodes.
            batch: The running batch of B requests, with the latest draft input.
            transfer: To and from the draft's device.
            clock: Takes the times.
            speculating: [B] bool, which requests draft.
            num_steps: Draft steps after that of the roots which the policy may ask for.
            order: What the policy promises.
        """
        super().__init__(
            steps, batch, transfer, clock, speculating=speculating, num_steps=num_steps
        )
        self._num_steps = num_steps
        self._num_expanded = 0
        self._widths_on_device: IntArray = np.full(len(speculating), self._layout.branches)
        self._num_launched = min(order.num_certain_steps, num_steps)
        self._begin(self._num_launched)
        if self._num_launched < num_steps:
            self._launch()

    def foreseen_trees(self) -> CandidateTrees | None:
        """The finished trees, where the policy has nothing to decide; after `meet_roots`.

        Returns:
            What growing them level by level returns; None where the policy must be asked.
        """
        if self._num_first < self._num_steps:
            return None
        return assemble_trees(
            self._layout,
            self._first_mail,
            self._num_steps,
            topk=self._steps.topk,
            speculating=self._speculating,
        )

    def expand(self, handles: IntArray, topk: int) -> Children:
        """Children of the first nodes of the newest level, in the order of their confidence.

        Args:
            handles: [B, W] int64, their handles; `NO_NODE` is padding, at the end of each row.
            topk: Children of each.

        Returns:
            [B, W, topk].
        """
        valid = handles != NO_NODE
        self._num_expanded += 1
        if self._num_launched == self._num_expanded < self._num_steps:
            self._narrow(valid.sum(axis=1))
            self._launch()
        mail = self._first_mail
        if self._num_expanded > self._num_first:
            mail = self._receive(self._num_expanded)
        level = self._layout.level(mail, self._num_expanded)
        return self._children(level[:, :, : handles.shape[1]], topk, valid)

    def _narrow(self, widths: IntArray) -> None:
        # A row that stops has no node in any later level, whatever the device does with it.
        wanted = np.where(widths > 0, widths, self._widths_on_device)
        if (wanted != self._widths_on_device).any():
            self._transfer.send_into(self._num_launched, self._buffers.widths, wanted)
            self._widths_on_device = wanted

    def _launch(self) -> None:
        self._run(self._num_launched)
        self._num_launched += 1
