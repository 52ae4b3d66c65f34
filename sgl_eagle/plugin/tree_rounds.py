"""Rounds in which somebody drafts: from the batch to the trees that the target verifies."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from sgl_eagle.plugin import compat
from sgl_eagle.plugin.ahead_drafter import AheadDrafter
from sgl_eagle.plugin.draft_graphs import DraftGraphs
from sgl_eagle.plugin.draft_steps import DraftSteps, EagerSteps
from sgl_eagle.plugin.drafter import ServerDrafter, StepwiseDrafter
from sgl_eagle.plugin.finished_step import DraftedTrees
from sgl_eagle.plugin.foreseen_rounds import (
    MAILS_KEPT,
    ForeseenRounds,
)
from sgl_eagle.plugin.host_transfer import HostTransfer
from sgl_eagle.plugin.observer import StepObserver
from sgl_eagle.plugin.request_tiers import TierChoice
from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle.plugin.runtime_states import RuntimeStates
from sgl_eagle.plugin.verify_ahead import PreparedVerify, make_verify_input, prepare_verify
from sgl_eagle.plugin.verify_input import (
    MaskLayout,
    PackedTrees,
    TreeTensors,
    largest_tree,
    pack_trees,
    send_trees,
)
from sgl_eagle.plugin.verify_sizes import verify_sizes
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.policies.confidence_order import confidence_order
from sgl_eagle_harness.policies.open_decisions import decides_nothing, may_decide_nothing
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.types import NO_NODE, BatchContext, TreeLimits


class TreeRounds:
    """Drafts, asks the policy, and lays trees out.

    Of three ways the quickest that the policy allows: the device does everything; the device drafts
    ahead of the policy; every step waits for it.
    """

    def __init__(self, worker: Any, policy: SpecPolicy, *, capture: bool) -> None:
        """Capture the draft steps of a policy.

        Args:
            worker: Our worker.
            policy: The one to start with.
            capture: Whether the server decodes in graphs.
        """
        self._worker = worker
        num_steps = int(worker.speculative_num_steps)
        # Mail after each draft step of a round may be on its way at the same time.
        self._transfer = HostTransfer(worker.device, num_slots=num_steps + MAILS_KEPT)
        self._capture = capture and num_steps > 1
        self._graphs: DraftGraphs | None = None
        self._foreseen = ForeseenRounds(self._transfer, first_slot=num_steps)
        self._foreseen_sizes: set[int] = set()
        self._prepared: PreparedVerify | None = None
        self._latest_size: int | None = None
        self._layouts: dict[tuple[int, int], MaskLayout] = {}
        self._latest_policy: SpecPolicy | None = None
        self._latest_decides_nothing = False
        self._capture_steps(policy)

    def settle(self, policy: SpecPolicy, states: RuntimeStates) -> None:
        """Prepare for the policy that will serve.

        Args:
            policy: It.
            states: The graphs of its verify sizes.
        """
        if policy.limits is None:
            return
        self._latest_policy = None
        self._layouts.clear()
        graphs, topk = self._graphs, policy.limits.topk
        chooses = confidence_order(policy) is not None
        if graphs is not None and (graphs.chooses, graphs.topk) != (chooses, topk):
            self._capture_steps(policy)
            self._foreseen_sizes = set()
        if not may_decide_nothing(policy) or self._worker.plan_stream is not None:
            return
        for size in set(verify_sizes(policy)) & set(states.sizes) - {1}:
            if self._capture_trees(states, size):
                self._foreseen_sizes.add(size)

    def draft(
        self,
        states: RuntimeStates,
        batch: Any,
        choice: TierChoice,
        clock: RoundClock,
        observer: StepObserver | None,
    ) -> Any | None:
        """Draft for a batch.

        Args:
            states: The graphs of its verify sizes.
            batch: The running batch of B requests, with the latest draft input.
            choice: Who drafts, under which policy.
            clock: Takes the times.
            observer: Told what was drafted, if there is one.

        Returns:
            An `EagleVerifyInput`; None where the policy verifies the roots alone.
        """
        policy, num_rows = choice.policy, len(choice.speculating)
        limits = policy.limits
        assert limits is not None  # of rounds that draft
        foresees = choice.everyone and self._can_foresee(policy)
        chooses = foresees or confidence_order(policy, num_rows) is not None
        steps = self._steps(num_rows, chooses=chooses, topk=limits.topk)
        with steps.context():
            if foresees:
                foreseen = self._foresee(limits, states, steps, batch, clock, observer)
                if foreseen is not None:
                    return foreseen
            with clock.stage("roots"):
                drafter = self._begin(policy, steps, batch, choice, clock)
            self._prepare_verify(states, batch, clock)
            drafter.meet_roots()
            context = choice.context(batch)
            packed = _choose_trees(policy, states, drafter, choice, context, observer)
        if packed.tokens.shape[1] == 1:
            return None
        with clock.stage("pack"):
            states.use(packed.tokens.shape[1])
            return self._send(packed, drafter)

    def _can_foresee(self, policy: SpecPolicy) -> bool:
        # The same few policies are asked about in every round.
        if policy is not self._latest_policy:
            self._latest_policy = policy
            limits = policy.limits
            fits = limits is not None and limits.num_draft_tokens in self._foreseen_sizes
            self._latest_decides_nothing = fits and decides_nothing(policy)
        return self._latest_decides_nothing

    def _capture_trees(self, states: RuntimeStates, size: int) -> bool:
        # Whether rounds of this size can be foreseen.
        if self._graphs is None:
            return True
        states.use(size)
        with compat.draft_context():
            layout = self._mask_layout(1)
            if layout.buffer is None:
                return False
            self._graphs.capture_trees(size, layout)
        return True

    def _capture_steps(self, policy: SpecPolicy) -> None:
        if not self._capture or policy.limits is None:
            return
        chooses = confidence_order(policy) is not None
        with compat.draft_context():
            self._graphs = DraftGraphs(
                self._worker.draft_worker,
                chooses=chooses,
                topk=policy.limits.topk,
                num_certain_steps=policy.limits.num_steps - 1 if chooses else 0,
            )

    def _steps(self, num_rows: int, *, chooses: bool, topk: int) -> DraftSteps:
        graphs = self._graphs
        if graphs is not None and graphs.fits(num_rows):
            same = (graphs.chooses, graphs.topk) == (chooses, topk)
            if same or not (chooses or graphs.chooses):
                return graphs
        return EagerSteps(self._worker.draft_worker, chooses=chooses, topk=topk)

    def _foresee(
        self,
        limits: TreeLimits,
        states: RuntimeStates,
        steps: DraftSteps,
        batch: Any,
        clock: RoundClock,
        observer: StepObserver | None,
    ) -> Any | None:
        # None where only the host knows where the mask goes.
        size = limits.num_draft_tokens
        layout = self._layout_of(states, size, len(batch.reqs))
        if layout.shows_prefix and layout.buffer is None:
            return None
        trees, late = self._foreseen.draft(steps, batch, layout, clock, limits=limits)
        if observer is not None:
            observer.drafted(late)
        if layout.buffer is None or not states.captured:
            with clock.stage("verify"):
                return make_verify_input(self._worker, trees)
        with clock.stage("verify"):
            states.use(size)
            return prepare_verify(self._worker, batch, trees).verify_input

    def _begin(
        self,
        policy: SpecPolicy,
        steps: DraftSteps,
        batch: Any,
        choice: TierChoice,
        clock: RoundClock,
    ) -> ServerDrafter:
        order = confidence_order(policy, len(choice.speculating))
        limits = policy.limits
        make = StepwiseDrafter if order is None else partial(AheadDrafter, order=order)
        return make(
            steps,
            batch,
            self._transfer,
            clock,
            speculating=choice.speculating,
            num_steps=0 if limits is None else limits.num_steps - 1,
        )

    def _prepare_verify(self, states: RuntimeStates, batch: Any, clock: RoundClock) -> None:
        # At the size of the round before.
        self._prepared = None
        worker, size = self._worker, self._latest_size
        if size is None or not states.captured or worker.plan_stream is not None:
            return
        with clock.stage("verify"):
            states.use(size)
            layout = self._mask_layout(len(batch.reqs))
            if layout.buffer is not None and compat.reads_mask_late(worker.target_worker):
                shape = (5, len(batch.reqs), size)
                numbers = torch.zeros(shape, dtype=torch.int64, device=worker.device)
                room = TreeTensors(numbers=numbers, mask=layout.buffer)
                self._prepared = prepare_verify(worker, batch, room)

    def _send(self, packed: PackedTrees, drafter: ServerDrafter) -> Any:
        num_rows, num_draft_tokens = packed.tokens.shape
        trees = send_trees(
            packed,
            self._transfer,
            root_tokens=drafter.root_tokens,
            context_len=drafter.context_len,
            layout=self._mask_layout(num_rows),
        )
        self._latest_size = num_draft_tokens
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.num_draft_tokens != num_draft_tokens:
            return make_verify_input(self._worker, trees)
        prepared.fill(trees)
        return prepared.verify_input

    def _layout_of(self, states: RuntimeStates, size: int, num_rows: int) -> MaskLayout:
        # Captured states keep their attention backends, and those their buffers.
        known = self._layouts.get((size, num_rows))
        if known is not None:
            return known
        states.use(size)
        layout = self._mask_layout(num_rows)
        if states.captured:
            self._layouts[size, num_rows] = layout
        return layout

    def _mask_layout(self, num_rows: int) -> MaskLayout:
        shows_prefix, buffer = compat.tree_mask_layout(self._worker.target_worker, num_rows)
        return MaskLayout(shows_prefix=shows_prefix, buffer=buffer)


def _choose_trees(
    policy: SpecPolicy,
    states: RuntimeStates,
    drafter: ServerDrafter,
    choice: TierChoice,
    context: BatchContext,
    observer: StepObserver | None,
) -> PackedTrees:
    trees = drafter.foreseen_trees()
    if trees is None:
        trees = grow_trees(drafter, policy, context)
    columns = policy.select_verify(trees, context)
    columns = np.where(choice.speculating[:, None], columns, NO_NODE)
    if observer is not None:
        observer.drafted(DraftedTrees(trees=trees, columns=columns, speculating=choice.speculating))
    return pack_trees(trees, columns, states.size_for(largest_tree(columns)))
