"""Dense traces in memory: the largest tree drafted at every position of a text.

Letters: P positions, T nodes a position (padded), K `header.topk`, n positions of one prompt. The
nodes of a row come in groups of K siblings, most probable first, every group after its parent;
the first group holds the root's children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from sgl_eagle_harness.errors import TraceError
from sgl_eagle_harness.trace_schema import TraceHeader
from sgl_eagle_harness.types import NO_NODE, BoolArray, Float32Array, IntArray

Int8Array = npt.NDArray[np.int8]
Int16Array = npt.NDArray[np.int16]
Int32Array = npt.NDArray[np.int32]

NODE_PADDING: dict[str, float] = {
    "tokens": 0,
    "parents": NO_NODE,
    "depths": 0,
    "ranks": 0,
    "step_log_probs": -np.inf,
    "target_log_probs": -np.inf,
    "first_child": NO_NODE,
    "on_path": False,
}
"""What the padding of each [P, T] array holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTrace:
    """What a recorder hands over for one prompt: n positions in text order.

    Attributes:
        prompt_id: Unique in the trace.
        workload: Workload key, e.g. "code".
        context_len: [n] int64, tokens before the root, root excluded.
        next_token: [n] int32, the target's token after each root; row 0 is completion token 0.
        tokens: [n, T] int32.
        parents: [n, T] int16, column of the parent in the row, `NO_NODE` for the root's children.
        depths: [n, T] int8, 0 for padding, which may lie anywhere.
        step_log_probs: [n, T] float32, natural log, at most 0.
        target_log_probs: [n, T] float32, the target's log probability of the node given its
            parent, under the recorded sampling parameters; None for greedy text.
    """

    prompt_id: str
    workload: str
    context_len: IntArray
    next_token: Int32Array
    tokens: Int32Array
    parents: Int16Array
    depths: Int8Array
    step_log_probs: Float32Array
    target_log_probs: Float32Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTrace:
    """Positions in text order; all positions of a prompt lie together.

    Position i of a prompt has the completion token i - 1 as its root (the last prompt token for
    i = 0); a node of depth d predicts completion token i + d - 1.

    Attributes:
        header: Provenance of the first shard, with the prompt files of all.
        tokens: [P, T] int32, 0 for padding.
        parents: [P, T] int16, column in the row, `NO_NODE` for the root's children and padding.
        depths: [P, T] int8, 0 for padding.
        ranks: [P, T] int8, rank among siblings.
        step_log_probs: [P, T] float32, minus infinity for padding.
        target_log_probs: [P, T] float32, or None where the text is greedy.
        first_child: [P, T] int16, column of the node's first child, `NO_NODE` if not expanded.
        on_path: [P, T] bool, the node's path spells the recorded text; False beyond its end.
        context_len: [P] int64, tokens before the root token, root excluded.
        next_token: [P] int32, the target's token after the root.
        prompt_index: [P] int32, index into `prompt_ids`.
        position: [P] int32, 0-based in the completion.
        is_last: [P] bool, last position of its prompt.
        prompt_ids: One per prompt.
        prompt_workloads: One per prompt.
    """

    header: TraceHeader
    tokens: Int32Array
    parents: Int16Array
    depths: Int8Array
    ranks: Int8Array
    step_log_probs: Float32Array
    target_log_probs: Float32Array | None
    first_child: Int16Array
    on_path: BoolArray
    context_len: IntArray
    next_token: Int32Array
    prompt_index: Int32Array
    position: Int32Array
    is_last: BoolArray
    prompt_ids: list[str]
    prompt_workloads: list[str]

    @property
    def num_positions(self) -> int:
        """P."""
        return len(self.position)

    @property
    def num_prompts(self) -> int:
        """Prompts in the trace."""
        return len(self.prompt_ids)

    @property
    def num_children(self) -> int:
        """Children stored of every expanded node."""
        return self.header.topk

    @property
    def prompt_starts(self) -> IntArray:
        """[num_prompts + 1] int64, first position of each prompt, then P."""
        return np.append(np.flatnonzero(self.position == 0), self.num_positions)

    @property
    def last_row(self) -> IntArray:
        """[P] int64, row of the last position of the same prompt."""
        return self.prompt_starts[1:][self.prompt_index] - 1

    def select(
        self, *, workload: str | None = None, prompts: Sequence[int] | None = None
    ) -> DenseTrace:
        """The part of the trace that belongs to some prompts.

        Args:
            workload: Keep only prompts of this workload.
            prompts: Keep only these prompt indices, in this order.

        Returns:
            A trace whose `prompt_index` counts from 0 again; node arrays are copies.

        Raises:
            TraceError: If nothing is left, or a prompt index does not exist.
        """
        chosen = list(range(self.num_prompts)) if prompts is None else list(prompts)
        if any(not 0 <= index < self.num_prompts for index in chosen):
            raise TraceError(f"prompt indices must be in [0, {self.num_prompts}), got {chosen}")
        if workload is not None:
            chosen = [index for index in chosen if self.prompt_workloads[index] == workload]
        if not chosen:
            known = ", ".join(sorted(set(self.prompt_workloads)))
            raise TraceError(f"no prompt of workload={workload!r} in the trace; it has {known}")
        starts = self.prompt_starts
        pieces = [np.arange(starts[index], starts[index + 1]) for index in chosen]
        rows = np.concatenate(pieces)
        taken = {
            item.name: value[rows]
            for item in fields(self)
            if isinstance(value := getattr(self, item.name), np.ndarray)
        }
        lengths = [len(piece) for piece in pieces]
        taken["prompt_index"] = np.repeat(np.arange(len(chosen), dtype=np.int32), lengths)
        return replace(
            self,
            prompt_ids=[self.prompt_ids[index] for index in chosen],
            prompt_workloads=[self.prompt_workloads[index] for index in chosen],
            **taken,
        )


def spell_text(
    tokens: Int32Array,
    parents: Int16Array,
    depths: Int8Array,
    next_token: Int32Array,
    last_row: IntArray,
) -> BoolArray:
    """Find the nodes whose whole path spells the text that follows.

    Args:
        tokens: [P, T] int32.
        parents: [P, T] int16.
        depths: [P, T] int8, 0 for padding.
        next_token: [P] int32, one text after the other.
        last_row: [P] int64, row where the text of each row ends.

    Returns:
        [P, T] bool, False for padding and for predictions beyond the end of the text.
    """
    rows = np.arange(len(next_token))[:, None]
    on_path = np.zeros(tokens.shape, np.bool_)
    for depth in range(1, int(depths.max(initial=0)) + 1):
        predicted = np.minimum(rows + depth - 1, last_row[:, None])
        inside = rows + depth - 1 <= last_row[:, None]
        spelled = (depths == depth) & (tokens == next_token[predicted]) & inside
        where = np.nonzero(spelled)
        if depth > 1:
            kept = on_path[where[0], parents[where]]
            where = (where[0][kept], where[1][kept])
        on_path[where] = True
    return on_path


def link_children(parents: Int16Array, depths: Int8Array, topk: int) -> Int16Array:
    """Invert the parents of rows that are made of groups of `topk` siblings.

    Args:
        parents: [P, T] int16, checked.
        depths: [P, T] int8, 0 for padding.
        topk: Group size, which divides T.

    Returns:
        [P, T] int16, column of each node's first child, `NO_NODE` where it was not expanded.
    """
    first_child = np.full(parents.shape, NO_NODE, np.int16)
    rows, groups = np.nonzero(depths[:, topk::topk])
    columns = (groups + 1) * topk
    first_child[rows, parents[rows, columns]] = columns
    return first_child


def merge_traces(traces: Sequence[DenseTrace]) -> DenseTrace:
    """Put traces with agreeing headers after one another.

    Args:
        traces: At least one.

    Returns:
        One trace, padded to the widest.
    """
    first = traces[0]
    if len(traces) == 1:
        return first
    width = max(trace.tokens.shape[1] for trace in traces)
    merged = {}
    for item in fields(first):
        arrays = [getattr(trace, item.name) for trace in traces]
        if not isinstance(arrays[0], np.ndarray):
            continue
        if item.name in NODE_PADDING:
            fill = NODE_PADDING[item.name]
            arrays = [
                np.pad(a, ((0, 0), (0, width - a.shape[1])), constant_values=fill) for a in arrays
            ]
        merged[item.name] = np.concatenate(arrays)
    offsets = np.cumsum([0, *(trace.num_prompts for trace in traces)])[:-1]
    shifted = [t.prompt_index + np.int32(o) for t, o in zip(traces, offsets, strict=True)]
    merged["prompt_index"] = np.concatenate(shifted)
    files = {file: None for trace in traces for file in trace.header.prompts.files}
    source = first.header.prompts.model_copy(update={"files": tuple(files)})
    return replace(
        first,
        header=first.header.model_copy(update={"prompts": source}),
        prompt_ids=[name for trace in traces for name in trace.prompt_ids],
        prompt_workloads=[name for trace in traces for name in trace.prompt_workloads],
        **merged,
    )
