"""A dense trace as a drafter: the recorded children stand in for the draft model."""

from __future__ import annotations

import numpy as np

from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.types import NO_NODE, BoolArray, Children, Float32Array, IntArray


class RecordedDrafter:
    """Serves the children that a dense trace recorded, for a run of its positions at once.

    A handle is the node's column in the trace. A row that asks for a node which the recording did
    not expand, or for more children than it kept, is marked as uncovered and gets invalid children;
    nothing is ever made up for it.

    Attributes:
        widths: One [B] int64 array per draft step, nodes expanded in it; the first expands the
            root.
        missing: One [B] bool array per draft step, rows that asked for something the trace does
            not hold.
    """

    def __init__(self, trace: DenseTrace, start: int, stop: int) -> None:
        self._tokens = trace.tokens[start:stop].reshape(-1)
        self._log_probs = trace.step_log_probs[start:stop].reshape(-1)
        self._first_child = trace.first_child[start:stop].reshape(-1)
        self._recorded_topk = trace.header.topk
        num_rows = stop - start
        self._row_offset = (np.arange(num_rows) * trace.tokens.shape[1])[:, None]
        self.widths: list[IntArray] = []
        self.missing: list[BoolArray] = []

    @property
    def uncovered(self) -> BoolArray:
        """[B] bool, rows that asked for something the trace does not hold, in any step."""
        return np.asarray(np.any(self.missing, axis=0))

    def expand_root(self, topk: int) -> Children:
        """First draft step: the trace's first columns are the root's children, by rank.

        Args:
            topk: Children to return.

        Returns:
            [B, 1, topk] children of the roots.
        """
        first = np.zeros_like(self._row_offset)
        return self._children(first, np.ones(first.shape, np.bool_), topk)

    def expand(self, handles: IntArray, topk: int) -> Children:
        """One more draft step.

        Args:
            handles: [B, W] int64 trace columns to expand; `NO_NODE` is padding.
            topk: Children to return of each.

        Returns:
            [B, W, topk] children, invalid where the handle was padding or was not recorded.
        """
        asked = handles != NO_NODE
        # Padding reads some other node's entry; `asked` discards it.
        index = self._row_offset + handles
        first = self._first_child.take(index, mode="clip").astype(np.int64)
        return self._children(first, asked, topk)

    def _children(self, first: IntArray, asked: BoolArray, topk: int) -> Children:
        self.widths.append(asked.sum(axis=1))
        if topk > self._recorded_topk:
            self.missing.append(np.asarray(asked.any(axis=1)))
            return _no_children(asked.shape, topk)
        known = asked & (first != NO_NODE)
        self.missing.append(np.asarray((asked != known).any(axis=1)))
        handles = first[:, :, None] + np.arange(topk)
        index = handles + self._row_offset[:, :, None]
        return Children(
            tokens=self._tokens.take(index, mode="clip").astype(np.int64),
            log_probs=self._log_probs.take(index, mode="clip"),
            handles=handles,
            valid=np.broadcast_to(known[:, :, None], handles.shape),
        )


def _no_children(shape: tuple[int, ...], topk: int) -> Children:
    shape = (*shape, topk)
    log_probs: Float32Array = np.full(shape, -np.inf, np.float32)
    return Children(
        tokens=np.zeros(shape, np.int64),
        log_probs=log_probs,
        handles=np.full(shape, NO_NODE),
        valid=np.zeros(shape, np.bool_),
    )
