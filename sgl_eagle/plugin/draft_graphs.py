"""Draft steps captured in CUDA graphs: one graph a step and batch size, so that any may be last."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from sgl_eagle.plugin import compat_graphs
from sgl_eagle.plugin.device_trees import empty_trees, write_trees
from sgl_eagle.plugin.draft_segment import (
    DraftBuffers,
    choose_frontier,
    find_slots,
    place_roots,
    read_batch,
    run_segment,
    start_round,
)
from sgl_eagle.plugin.verify_input import MaskLayout, TreeTensors

logger = logging.getLogger(__name__)


class DraftGraphs:
    """Implements `DraftSteps` by graphs, for the batch sizes that SGLang captures.

    A batch is padded to the next captured size. Padding rows read and write slot 0, SGLang's own
    padding.
    """

    def __init__(self, worker: Any, *, chooses: bool, topk: int, num_certain_steps: int) -> None:
        """Capture.

        Args:
            worker: SGLang's draft worker, its attention backends made.
            chooses: Whether steps choose the nodes that they expand.
            topk: Children of a node, and nodes of a step, that they choose among; at most the
                server's.
            num_certain_steps: First draft steps that will always be run, as one graph.
        """
        self._worker = worker
        self.chooses = chooses
        self.topk = topk
        self._num_certain_steps = num_certain_steps
        self._sizes = compat_graphs.captured_batch_sizes(worker)
        self._num_steps = int(worker.speculative_num_steps)
        branches = int(worker.topk)
        self._buffers = DraftBuffers.allocate(
            num_rows=self._sizes[-1],
            branches=branches,
            topk=topk,
            num_steps=self._num_steps,
            hidden=compat_graphs.draft_hidden_states(worker),
        )
        worker.draft_attn_backend.init_cuda_graph_state(self._sizes[-1], self._sizes[-1] * branches)
        self._plans_with_slots = compat_graphs.reads_slots_early(worker)
        self._padding_len = compat_graphs.seq_len_of_padding(worker)
        self._buffers.seq_lens.fill_(self._padding_len)
        self._firsts: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._steps: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._forward_batches: dict[int, Any] = {}
        self._trees: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, TreeTensors]] = {}
        self._trees_of: dict[tuple[int, int], TreeTensors] = {}
        self._size = 0
        self._rows: dict[int, DraftBuffers] = {}
        self._batch: Any = None
        self._no_context = nullcontext()
        started = time.perf_counter()
        with compat_graphs.capturing() as stream:
            for size in reversed(self._sizes):  # smaller graphs fit into the memory of larger ones
                self._capture(size, stream)
        logger.info(
            "SGL_EAGLE captured %d draft steps for batches of %s in %.1f s",
            self._num_steps - 1,
            self._sizes,
            time.perf_counter() - started,
        )

    def context(self) -> AbstractContextManager[None]:
        """None: what the draft model looks up was looked up when it was captured.

        Returns:
            To be entered around everything else.
        """
        return self._no_context

    def fits(self, num_rows: int) -> bool:
        """Whether a batch is at most as large as the largest captured one.

        Args:
            num_rows: B.

        Returns:
            Whether `start` takes it.
        """
        return num_rows <= self._sizes[-1]

    def start(self, batch: Any) -> DraftBuffers:
        """Take over a batch.

        Args:
            batch: SGLang's running batch of B requests, which fits.

        Returns:
            B rows.
        """
        num_rows = len(batch.seq_lens)
        self._batch = batch
        self._size = next(size for size in self._sizes if size >= num_rows)
        if self._size != num_rows:
            self._buffers.seq_lens.fill_(self._padding_len)
            self._buffers.pool_indices.zero_()
        rows = self._first(num_rows)
        read_batch(rows, batch)
        place_roots(self._first(self._size))
        return rows

    def plan(self) -> None:
        """Prepare the attention of all draft steps."""
        forward_batch, batch = self._forward_batches[self._size], self._batch
        num_padding = self._size - len(batch.seq_lens)
        lengths = batch.seq_lens_cpu
        if lengths is None:
            forward_batch.seq_lens_cpu = forward_batch.seq_lens_sum = None
        else:
            padding = lengths.new_full((num_padding,), self._padding_len)
            forward_batch.seq_lens_cpu = torch.cat([lengths, padding])
            forward_batch.seq_lens_sum = int(forward_batch.seq_lens_cpu.sum())
        if self._plans_with_slots:
            rows = self._first(self._size)
            find_slots(self._worker, rows)
            forward_batch.out_cache_loc = rows.slots.flatten()
        backend = self._worker.draft_attn_backend
        with compat_graphs.attention_context(backend):
            backend.init_forward_metadata_out_graph(forward_batch)

    def run_first(self, num_steps: int) -> None:
        """Write the roots' children to `mail`, and run the first draft steps.

        Args:
            num_steps: How many.
        """
        together = self._firsts.get((self._size, num_steps))
        if together is not None:
            together.replay()
            return
        self._firsts[self._size, 0].replay()
        for step in range(num_steps):
            self.run(step)

    def run(self, step: int) -> None:
        """Expand nodes of the newest level and write their children to `mail`.

        Args:
            step: 0-based draft step.
        """
        self._steps[self._size, step].replay()

    def capture_trees(self, num_draft_tokens: int, layout: MaskLayout) -> None:
        """Prepare `lay_out_trees` for all batch sizes and any number of draft steps, once.

        Args:
            num_draft_tokens: Nodes of every tree, root included.
            layout: Of the mask, with its buffer.
        """
        if (self._sizes[0], num_draft_tokens) in self._trees:
            return
        with compat_graphs.capturing() as stream:
            for size in reversed(self._sizes):
                rows = self._buffers.first(size)
                trees = empty_trees(rows, num_draft_tokens, layout)
                write = partial(write_trees, rows, trees, shows_prefix=layout.shows_prefix)
                graph = compat_graphs.capture_graph(write, stream)
                self._trees[size, num_draft_tokens] = graph, trees

    def lay_out_trees(self, num_draft_tokens: int, layout: MaskLayout) -> TreeTensors:
        """Make trees of the most confident nodes, after all draft steps of the round.

        Args:
            num_draft_tokens: Nodes of every tree, root included; as captured.
            layout: Of the mask; as captured.

        Returns:
            B trees; the next round's replace them.
        """
        del layout
        graph, trees = self._trees[self._size, num_draft_tokens]
        graph.replay()
        key = len(self._batch.seq_lens), num_draft_tokens
        rows = self._trees_of.get(key)
        if rows is None:
            rows = TreeTensors(numbers=trees.numbers[:, : key[0]], mask=trees.mask)
            self._trees_of[key] = rows
        return rows

    def _first(self, num_rows: int) -> DraftBuffers:
        # Kept: a round would make a dozen views.
        rows = self._rows.get(num_rows)
        if rows is None:
            rows = self._rows[num_rows] = self._buffers.first(num_rows)
        return rows

    def _capture(self, size: int, stream: torch.cuda.Stream) -> None:
        rows = self._buffers.first(size)
        place_roots(rows)
        self._forward_batches[size] = forward_batch = compat_graphs.make_captured_batch(
            self._worker,
            seq_lens=rows.seq_lens,
            pool_indices=rows.pool_indices,
            positions=rows.positions,
            out_cache_loc=rows.slots.flatten(),
            hidden=rows.hidden.flatten(0, 1),
        )
        backend = self._worker.draft_attn_backend
        with compat_graphs.attention_context(backend):
            backend.init_forward_metadata_out_graph(forward_batch, in_capture=True)
            forward_batch.mark_forward_metadata_ready()
            for num_steps in sorted({0, self._num_certain_steps}):
                first = partial(self._run_first, forward_batch, rows, num_steps)
                self._firsts[size, num_steps] = compat_graphs.capture_graph(first, stream)
            for step in range(self._num_steps - 1):
                segment = partial(self._run_segment, forward_batch, rows, step)
                self._steps[size, step] = compat_graphs.capture_graph(segment, stream)

    def _run_first(self, forward_batch: Any, rows: DraftBuffers, num_steps: int) -> None:
        start_round(self._worker, rows)
        for step in range(num_steps):
            self._run_segment(forward_batch, rows, step)

    def _run_segment(self, forward_batch: Any, rows: DraftBuffers, step: int) -> None:
        if step == 0:
            self._worker.draft_attn_backend.init_forward_metadata_in_graph(forward_batch)
        if self.chooses:
            choose_frontier(rows, step)
        run_segment(self._worker, forward_batch, rows, step)
