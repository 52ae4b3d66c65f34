"""The draft's cache alone, brought up to date after plain rounds."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sgl_eagle.plugin import compat, compat_draft_cache, compat_graphs, compat_plain
from sgl_eagle.plugin.draft_backlog import DraftBacklog

logger = logging.getLogger(__name__)


def make_cache_writer(
    draft_worker: Any, backlog: DraftBacklog, *, capture: bool
) -> CacheWriter | None:
    """Prepare to write the draft's cache without the rest of its pass, where that is possible.

    Args:
        draft_worker: SGLang's draft worker.
        backlog: What the draft has not seen.
        capture: Whether the server decodes in graphs.

    Returns:
        The writer; None where only a whole pass writes the cache, which a log line says.
    """
    padding = torch.zeros((3, 1), dtype=torch.int64, device=backlog.device)
    if compat_draft_cache.has_one_attention(draft_worker) and write_window(
        draft_worker, backlog, padding
    ):
        return CacheWriter(draft_worker, backlog, capture=capture)
    logger.info(
        "SGL_EAGLE catches up with plain rounds by whole passes of %s: it is more than one "
        "attention layer with a plain cache",
        type(draft_worker.draft_runner.model).__name__,
    )
    return None


class CacheWriter:
    """Writes a window of every request, in a graph where the server decodes in graphs.

    A batch is padded to the next captured size. Graphs read the backlog where it is; padding rows
    write slot 0, SGLang's own padding.
    """

    def __init__(self, draft_worker: Any, backlog: DraftBacklog, *, capture: bool) -> None:
        """Capture.

        Args:
            draft_worker: SGLang's draft worker, of a draft that `write_window` works for.
            backlog: What the draft has not seen.
            capture: Whether the server decodes in graphs.
        """
        self._worker, self._backlog = draft_worker, backlog
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if not capture:
            return
        sizes = compat_graphs.captured_batch_sizes(draft_worker)
        self._numbers = torch.zeros((3, sizes[-1]), dtype=torch.int64, device=backlog.device)
        with compat_graphs.capturing() as stream:
            for size in reversed(sizes):  # smaller graphs fit into the memory of larger ones
                write = partial(write_window, draft_worker, backlog, self._numbers[:, :size])
                self._graphs[size] = compat_graphs.capture_graph(write, stream)

    def write(self, batch: Any, counts: Tensor) -> None:
        """Give the draft's cache what plain rounds have decoded.

        Args:
            batch: The running batch of B requests; left as it is.
            counts: [B] int64 on the host, tokens that the draft has not seen, at most a window.
        """
        num_rows = len(counts)
        on_device = compat_plain.send(counts, self._backlog.device)
        rows = [batch.req_pool_indices, batch.seq_lens, on_device]
        size = min((size for size in self._graphs if size >= num_rows), default=None)
        if size is None:
            write_window(self._worker, self._backlog, torch.stack(rows))
            return
        if size != num_rows:
            self._numbers.zero_()
        torch._foreach_copy_(list(self._numbers[:, :num_rows].unbind()), rows)
        self._graphs[size].replay()


def write_window(draft_worker: Any, backlog: DraftBacklog, numbers: Tensor) -> bool:
    """Write the draft's keys and values of all that is kept; the order of tokens does not matter.

    Args:
        draft_worker: SGLang's draft worker.
        backlog: What the draft has not seen.
        numbers: [3, R] int64: rows of SGLang's table of slots, cached tokens, and how many of the
            last of them the draft has not seen. Zeros are padding.

    Returns:
        Whether the pass ended where the cache was written, as it must.
    """
    rows, lengths, counts = numbers.unbind()
    tokens, features, positions = backlog.window_before(rows, lengths)
    is_seen = positions < (lengths - counts)[:, None]
    positions = positions.clamp(min=0)
    slots = compat.token_table(draft_worker)[rows[:, None], positions]
    return compat_draft_cache.write_cache(
        draft_worker,
        tokens=tokens.flatten(),
        features=features.flatten(0, 1),
        positions=positions.flatten(),
        slots=slots.masked_fill(is_seen, 0).flatten().to(torch.int64),
    )
