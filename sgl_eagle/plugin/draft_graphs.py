"""Draft steps captured in CUDA graphs: one graph a step and batch size, so that any may be last."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from sgl_eagle.plugin import compat_graphs
from sgl_eagle.plugin.draft_segment import DraftBuffers, run_segment

logger = logging.getLogger(__name__)


class DraftGraphs:
    """Graphs of all draft steps for the batch sizes that SGLang captures.

    Attributes:
        buffers: What the graphs read and write, for the largest batch.
    """

    def __init__(self, worker: Any) -> None:
        """Capture.

        Args:
            worker: SGLang's draft worker, its attention backends made.
        """
        self._worker = worker
        self._sizes = compat_graphs.captured_batch_sizes(worker)
        self._num_steps = int(worker.speculative_num_steps)
        branches = int(worker.topk)
        self.buffers = DraftBuffers.allocate(
            num_rows=self._sizes[-1],
            branches=branches,
            num_steps=self._num_steps,
            hidden=compat_graphs.draft_hidden_states(worker),
        )
        worker.draft_attn_backend.init_cuda_graph_state(self._sizes[-1], self._sizes[-1] * branches)
        self._padding_len = compat_graphs.seq_len_of_padding(worker)
        self.buffers.seq_lens.fill_(self._padding_len)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
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

    def fits(self, num_rows: int) -> bool:
        """Whether a batch is at most as large as the largest captured one.

        Args:
            num_rows: B.

        Returns:
            Whether `load` takes it.
        """
        return num_rows <= self._sizes[-1]

    def load(self, forward_batch: Any) -> int:
        """Fill in a batch and plan the attention of all its draft steps.

        Args:
            forward_batch: SGLang's batch of B * T rows, with slots of all steps.

        Returns:
            The captured batch size that it is padded to.
        """
        num_rows = len(forward_batch.seq_lens)
        size = next(size for size in self._sizes if size >= num_rows)
        buffers = self.buffers
        if size != num_rows:
            buffers.seq_lens.fill_(self._padding_len)
            for padded in (buffers.pool_indices, buffers.slots, buffers.positions):
                padded.zero_()
        rows = buffers.first(num_rows)
        rows.seq_lens.copy_(forward_batch.seq_lens)
        rows.pool_indices.copy_(forward_batch.req_pool_indices)
        rows.slots.copy_(forward_batch.out_cache_loc.view(rows.slots.shape))
        rows.positions.copy_(forward_batch.positions)
        padded_rows = buffers.first(size)
        forward_batch.batch_size = size
        forward_batch.seq_lens = padded_rows.seq_lens
        forward_batch.req_pool_indices = padded_rows.pool_indices
        forward_batch.positions = padded_rows.positions
        num_padding = size - num_rows
        if forward_batch.seq_lens_sum is not None:
            forward_batch.seq_lens_sum += num_padding * self._padding_len
        if forward_batch.seq_lens_cpu is not None:
            padding = forward_batch.seq_lens_cpu.new_full((num_padding,), self._padding_len)
            forward_batch.seq_lens_cpu = torch.cat([forward_batch.seq_lens_cpu, padding])
        backend = self._worker.draft_attn_backend
        with compat_graphs.attention_context(backend):
            backend.init_forward_metadata_out_graph(forward_batch)
        return size

    def replay(self, size: int, step: int) -> None:
        """Run one draft step over the loaded batch.

        Args:
            size: From `load`.
            step: 0-based draft step.
        """
        self._graphs[size, step].replay()

    def _capture(self, size: int, stream: torch.cuda.Stream) -> None:
        rows = self.buffers.first(size)
        forward_batch = compat_graphs.make_captured_batch(
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
            for step in range(self._num_steps - 1):

                def segment(step: int = step) -> None:
                    if step == 0:
                        backend.init_forward_metadata_in_graph(forward_batch)
                    run_segment(self._worker, forward_batch, rows, step)

                self._graphs[size, step] = compat_graphs.capture_graph(segment, stream)
        rows.positions.zero_()
