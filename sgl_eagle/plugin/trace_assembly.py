"""From steps of a server to the rows of a trace: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sgl_eagle.plugin.trace_messages import StepRows
from sgl_eagle_harness.dense_trace import PromptTrace
from sgl_eagle_harness.node_outcome import spell_path
from sgl_eagle_harness.ordinary_trace import OrdinaryStep
from sgl_eagle_harness.types import NO_NODE, Float32Array, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One step of one request, without padding; node i is the i-th of its arrays.

    Attributes:
        position: Completion tokens before the step.
        context_len: Tokens before the root.
        root_token: The root.
        emitted: [E] int64, tokens of the step.
        tokens: [N] int64.
        parents: [N] int64 index, `NO_NODE` for the root's children.
        depths: [N] int64.
        log_probs: [N] float32.
    """

    position: int
    context_len: int
    root_token: int
    emitted: IntArray
    tokens: IntArray
    parents: IntArray
    depths: IntArray
    log_probs: Float32Array


def split_rows(rows: StepRows, prompt_lens: Mapping[int, int]) -> list[tuple[int, RecordedStep]]:
    """Take the requests of a step apart.

    Args:
        rows: B requests.
        prompt_lens: Prompt tokens of those requests that are recorded, by number.

    Returns:
        Numbers and steps of these, where the step counts for them, in the same order.
    """
    return [
        (number, _one_row(rows, row, prompt_lens[number]))
        for row, (number, counted) in enumerate(
            zip(rows.numbers.tolist(), rows.counted, strict=True)
        )
        if counted and number in prompt_lens
    ]


def _one_row(rows: StepRows, row: int, prompt_len: int) -> RecordedStep:
    columns = rows.columns[row][rows.columns[row] != NO_NODE]
    new_index = np.full(len(rows.depths) + 1, NO_NODE)  # the root's children look at the last
    new_index[columns] = np.arange(len(columns))
    position = int(rows.position[row])
    return RecordedStep(
        position=position,
        context_len=prompt_len + position - 1,
        root_token=int(rows.root_token[row]),
        emitted=rows.emitted[row, : rows.num_accept_tokens[row]].copy(),  # not all rows' bytes
        tokens=rows.tokens[row, columns],
        parents=new_index[rows.parents[row, columns]],
        depths=rows.depths[columns],
        log_probs=np.minimum(rows.log_probs[row, columns], np.float32(0)),
    )


def ordinary_step(step: RecordedStep, *, prompt_id: str, workload: str) -> OrdinaryStep:
    """The row of an ordinary trace.

    Args:
        step: Its nodes are the verified ones.
        prompt_id: Which prompt.
        workload: Its workload key.

    Returns:
        The row, root first; the accepted path is the one that the emitted tokens spell.
    """
    drafts = step.emitted[:-1]
    on_path = spell_path(step.tokens, step.parents, step.depths, drafts)
    root_and_nodes = np.concatenate([[NO_NODE], np.where(step.parents < 0, 0, step.parents + 1)])
    return OrdinaryStep(
        prompt_id=prompt_id,
        workload=workload,
        position=step.position,
        context_len=step.context_len,
        tokens=np.concatenate([[step.root_token], step.tokens]),
        parents=root_and_nodes,
        path_log_confidence=np.concatenate([np.zeros(1, np.float32), step.log_probs]),
        accepted=1 + np.flatnonzero(on_path),
        bonus_token=int(step.emitted[-1]),
    )


def contiguous_part(steps: Sequence[RecordedStep], topk: int) -> list[RecordedStep]:
    """The longest beginning of a request that a dense trace may hold.

    Args:
        steps: One token each, in order.
        topk: Children of every expanded node.

    Returns:
        Steps up to the first gap (the request was retracted, or the queue was full) or the first
        row without a full set of children (the draft was not finite).
    """
    kept: list[RecordedStep] = []
    for step in steps:
        follows = not kept or step.position == kept[-1].position + 1
        whole = len(step.tokens) >= topk and len(step.tokens) % topk == 0
        if not follows or not whole or len(step.emitted) != 1:
            break
        kept.append(step)
    return kept


def dense_prompt(steps: Sequence[RecordedStep], *, prompt_id: str, workload: str) -> PromptTrace:
    """One prompt of a dense trace.

    The first completion token comes from prefill, before any tree is drafted, so that it counts
    with the prompt here: row 0 has it as its root.

    Args:
        steps: One token each, without gaps, at least one.
        prompt_id: Unique in the trace.
        workload: Its workload key.

    Returns:
        The trace of the prompt.
    """
    width = max(len(step.tokens) for step in steps)

    def stack(name: str, fill: float, dtype: type[np.generic]) -> np.ndarray:
        rows = [
            np.pad(values, (0, width - len(values)), constant_values=fill)
            for values in (getattr(step, name) for step in steps)
        ]
        return np.stack(rows).astype(dtype)

    return PromptTrace(
        prompt_id=prompt_id,
        workload=workload,
        context_len=np.array([step.context_len for step in steps]),
        next_token=np.array([step.emitted[0] for step in steps], np.int32),
        tokens=stack("tokens", 0, np.int32),
        parents=stack("parents", NO_NODE, np.int16),
        depths=stack("depths", 0, np.int8),
        step_log_probs=stack("log_probs", -np.inf, np.float32),
    )
