"""Rounds of a policy that has nothing to decide: the host launches them and waits for nothing."""

from __future__ import annotations

from typing import Any

from sgl_eagle.plugin.draft_steps import DraftSteps
from sgl_eagle.plugin.finished_step import STEPS_LOOKED_AT_TOGETHER
from sgl_eagle.plugin.foreseen_trees import ForeseenTrees
from sgl_eagle.plugin.host_transfer import HostTransfer
from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle.plugin.round_mail import RoundMail
from sgl_eagle.plugin.verify_input import MaskLayout, TreeTensors
from sgl_eagle_harness.types import TreeLimits

MAILS_KEPT = STEPS_LOOKED_AT_TOGETHER + 2
"""Rounds whose mail may be asked for: those that are looked at together and, under overlap
scheduling, the one that has been launched since the last of them. One more is spare."""


class ForeseenRounds:
    """Drafts and lays out trees on the device, and tells the host later what they were."""

    def __init__(self, transfer: HostTransfer, *, first_slot: int) -> None:
        """Prepare.

        Args:
            transfer: From the draft's device.
            first_slot: Of the transfer; it and the next `MAILS_KEPT - 1` are free for mail.
        """
        self._transfer, self._first_slot = transfer, first_slot
        self._round_ct = 0

    def draft(
        self,
        steps: DraftSteps,
        batch: Any,
        layout: MaskLayout,
        clock: RoundClock,
        *,
        limits: TreeLimits,
    ) -> tuple[TreeTensors, LateTrees]:
        """Launch everything up to the trees.

        Args:
            steps: Runs draft steps that choose their nodes.
            batch: The running batch of B requests, all of which draft.
            layout: Of the mask.
            clock: Takes the times.
            limits: Levels of this round's trees, and nodes of each; the steps' own topk.

        Returns:
            B trees on the device, and what the host may ask about them once the step is over.
        """
        with clock.stage("roots"):
            buffers = steps.start(batch)
            if limits.num_steps > 1:
                steps.plan()
        with clock.stage("draft"):
            steps.run_first(limits.num_steps - 1)
        slot = self._first_slot + self._round_ct % MAILS_KEPT
        self._round_ct += 1
        with clock.stage("pack"):
            self._transfer.post(slot, buffers.mail)
            trees = steps.lay_out_trees(limits.num_draft_tokens, layout)
        return trees, LateTrees(self._transfer, slot, buffers.layout, limits)


class LateTrees:
    """The trees of one round, read when somebody asks."""

    def __init__(
        self, transfer: HostTransfer, slot: int, layout: RoundMail, limits: TreeLimits
    ) -> None:
        """Remember where they will be.

        Args:
            transfer: Brings the mail.
            slot: Where to.
            layout: Of the mail.
            limits: Of the trees.
        """
        self._transfer, self._slot = transfer, slot
        self._layout, self._limits = layout, limits

    def __call__(self) -> ForeseenTrees:
        """Read the mail.

        Returns:
            What was drafted and verified.
        """
        # It was sent before the pass whose outcome is on the host.
        mail = self._transfer.read(self._slot)
        return ForeseenTrees(layout=self._layout, mail=mail, limits=self._limits)
