"""How draft steps run: one interface for kernels launched one by one and for captured graphs."""

from __future__ import annotations

from typing import Any, Protocol

from sgl_eagle.plugin import compat, compat_graphs
from sgl_eagle.plugin.draft_segment import (
    DraftBuffers,
    choose_frontier,
    read_batch,
    run_segment,
    start_round,
)


class DraftSteps(Protocol):
    """Runs the draft steps of one round.

    Attributes:
        chooses: Whether steps choose the nodes that they expand themselves, the most confident of
            the newest level, or expand those in `choice`.
    """

    chooses: bool

    def start(self, batch: Any) -> DraftBuffers:
        """Make the children of the roots known.

        Args:
            batch: SGLang's running batch of B requests.

        Returns:
            B rows, whose `roots` are being written.
        """
        ...

    def plan(self) -> None:
        """Prepare the attention of all draft steps; once a round, before the first step."""
        ...

    def run(self, step: int) -> None:
        """Expand nodes of the newest level and write their children to `level`.

        Args:
            step: 0-based draft step.
        """
        ...


class EagerSteps:
    """Launches every kernel: on a CPU, and for batches larger than any captured one."""

    def __init__(self, worker: Any, *, chooses: bool) -> None:
        """Prepare one round.

        Args:
            worker: SGLang's draft worker.
            chooses: Whether steps choose the nodes that they expand.
        """
        self._worker = worker
        self.chooses = chooses

    def start(self, batch: Any) -> DraftBuffers:
        """Make the children of the roots known.

        Args:
            batch: SGLang's running batch of B requests.

        Returns:
            B rows, whose `roots` are being written.
        """
        self._batch = batch
        self._buffers = DraftBuffers.allocate(
            num_rows=len(batch.seq_lens),
            branches=int(self._worker.topk),
            num_steps=int(self._worker.speculative_num_steps),
            hidden=compat_graphs.draft_hidden_states(self._worker),
        )
        read_batch(self._buffers, batch)
        start_round(self._worker, self._buffers)
        return self._buffers

    def plan(self) -> None:
        """Prepare the attention of all draft steps."""
        self._forward_batch = forward_batch = compat.prepare_draft_batch(self._worker, self._batch)
        self._worker.draft_attn_backend.init_forward_metadata(forward_batch)
        forward_batch.mark_forward_metadata_ready()
        forward_batch.positions = self._buffers.positions

    def run(self, step: int) -> None:
        """Expand nodes of the newest level and write their children to `level`.

        Args:
            step: 0-based draft step.
        """
        if self.chooses:
            choose_frontier(self._buffers, step)
        run_segment(self._worker, self._forward_batch, self._buffers, step)
