"""How draft steps run: one interface for kernels launched one by one and for captured graphs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from sgl_eagle.plugin import compat, compat_graphs
from sgl_eagle.plugin.device_trees import empty_trees, write_trees
from sgl_eagle.plugin.draft_segment import (
    DraftBuffers,
    choose_frontier,
    place_roots,
    read_batch,
    run_segment,
    start_round,
)
from sgl_eagle.plugin.verify_input import MaskLayout, TreeTensors


class DraftSteps(Protocol):
    """Runs the draft steps of one round.

    Attributes:
        chooses: Whether steps choose the nodes that they expand themselves, the most confident of
            the newest level, or expand those in `choice`.
        topk: Children of a node, and nodes of a step, that they choose among.
    """

    chooses: bool
    topk: int

    def context(self) -> AbstractContextManager[None]:
        """Settings under which the steps run.

        Returns:
            To be entered around everything else.
        """
        ...

    def start(self, batch: Any) -> DraftBuffers:
        """Take over a batch; its roots' children are not known yet.

        Args:
            batch: SGLang's running batch of B requests.

        Returns:
            B rows.
        """
        ...

    def plan(self) -> None:
        """Prepare the attention of all draft steps; once a round, before the first step."""
        ...

    def run_first(self, num_steps: int) -> None:
        """Write the roots' children to `mail`, and run the first draft steps.

        Args:
            num_steps: How many; those after the first must choose their nodes.
        """
        ...

    def run(self, step: int) -> None:
        """Expand nodes of the newest level and write their children to `mail`.

        Args:
            step: 0-based draft step.
        """
        ...

    def lay_out_trees(self, num_draft_tokens: int, layout: MaskLayout) -> TreeTensors:
        """Make trees of the most confident nodes, after all draft steps of the round.

        Args:
            num_draft_tokens: Nodes of every tree, root included.
            layout: Of the mask; rows over the prefix need its buffer.

        Returns:
            B trees.
        """
        ...


class EagerSteps:
    """Launches every kernel: on a CPU, and for batches larger than any captured one."""

    def __init__(self, worker: Any, *, chooses: bool, topk: int) -> None:
        """Prepare one round.

        Args:
            worker: SGLang's draft worker.
            chooses: Whether steps choose the nodes that they expand.
            topk: Children of a node, and nodes of a step, that they choose among; at most the
                server's.
        """
        self._worker = worker
        self.chooses = chooses
        self.topk = topk

    def context(self) -> AbstractContextManager[None]:
        """SGLang's, of its draft model.

        Returns:
            To be entered around everything else.
        """
        return compat.draft_context()

    def start(self, batch: Any) -> DraftBuffers:
        """Take over a batch.

        Args:
            batch: SGLang's running batch of B requests.

        Returns:
            B rows.
        """
        self._batch = batch
        self._buffers = DraftBuffers.allocate(
            num_rows=len(batch.seq_lens),
            branches=int(self._worker.topk),
            topk=self.topk,
            num_steps=int(self._worker.speculative_num_steps),
            hidden=compat_graphs.draft_hidden_states(self._worker),
        )
        read_batch(self._buffers, batch)
        place_roots(self._buffers)
        return self._buffers

    def plan(self) -> None:
        """Prepare the attention of all draft steps."""
        self._forward_batch = forward_batch = compat.prepare_draft_batch(self._worker, self._batch)
        self._worker.draft_attn_backend.init_forward_metadata(forward_batch)
        forward_batch.mark_forward_metadata_ready()
        forward_batch.positions = self._buffers.positions

    def run_first(self, num_steps: int) -> None:
        """Write the roots' children to `mail`, and run the first draft steps.

        Args:
            num_steps: How many.
        """
        start_round(self._worker, self._buffers)
        for step in range(num_steps):
            self.run(step)

    def run(self, step: int) -> None:
        """Expand nodes of the newest level and write their children to `mail`.

        Args:
            step: 0-based draft step.
        """
        if self.chooses:
            choose_frontier(self._buffers, step)
        run_segment(self._worker, self._forward_batch, self._buffers, step)

    def lay_out_trees(self, num_draft_tokens: int, layout: MaskLayout) -> TreeTensors:
        """Make trees of the most confident nodes, after all draft steps of the round.

        Args:
            num_draft_tokens: Nodes of every tree, root included.
            layout: Of the mask; rows over the prefix need its buffer.

        Returns:
            B trees.
        """
        trees = empty_trees(self._buffers, num_draft_tokens, layout)
        write_trees(self._buffers, trees, shows_prefix=layout.shows_prefix)
        return trees
