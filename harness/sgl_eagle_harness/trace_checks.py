"""Checks of a dense shard: what a row must satisfy before anything is computed from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_eagle_harness.dense_trace import DenseTrace, spell_text
from sgl_eagle_harness.errors import TraceError
from sgl_eagle_harness.records import ModelIdentity
from sgl_eagle_harness.trace_schema import MERGED_FIELDS, TraceHeader
from sgl_eagle_harness.types import NO_NODE


def check_dense_header(header: TraceHeader, source: str) -> None:
    """Refuse shards that must not be read as dense traces.

    Args:
        header: Header of the shard.
        source: File name for the message.

    Raises:
        TraceError: If nodes are missing or the text is not what the target would write.
    """
    if header.kind != "dense":
        raise TraceError(f"{source}: kind must be 'dense', got kind={header.kind!r}")
    if header.censored:
        raise TraceError(
            f"{source}: censored must be false, got censored=true: nodes that a stop or prune "
            "rule left out cannot be replayed; record with both off"
        )
    if header.prompts.kind != "text":
        raise TraceError(
            f"{source}: prompts.kind must be 'text', got {header.prompts.kind!r}: acceptance on "
            "random tokens says nothing about text"
        )
    if header.forced_continuation:
        raise TraceError(
            f"{source}: forced_continuation must be false, got true: text beyond the target's own "
            "end is not text it would write"
        )


def check_same_setup(first: TraceHeader, other: TraceHeader, names: tuple[str, str]) -> None:
    """Refuse to merge shards of different recordings.

    Args:
        first: Header to agree with.
        other: Header to check.
        names: File names of both, for the message.

    Raises:
        TraceError: Naming every field that differs.
    """
    differing = [
        f"{field}: {_shown(getattr(first, field))} and {_shown(getattr(other, field))}"
        for field in MERGED_FIELDS
        if getattr(first, field) != getattr(other, field)
    ]
    one, two = (h.sampling.model_copy(update={"seed": None}) for h in (first, other))
    if one != two:
        differing.append(f"sampling: {one!r} and {two!r}")
    if differing:
        raise TraceError(
            f"{names[0]} and {names[1]} were recorded differently: {'; '.join(differing)}"
        )


def _shown(value: object) -> str:
    if isinstance(value, ModelIdentity):
        return str(value)
    return repr(value)


def check_node_groups(
    node_counts: npt.NDArray[np.int64],
    nodes: dict[str, npt.NDArray[Any]],
    header: TraceHeader,
    source: str,
) -> None:
    """Check the tree structure of every row: groups of topk siblings, parents first.

    Args:
        node_counts: [P] int64 nodes of each row.
        nodes: [P, T] arrays by column name, padded.
        header: Header of the shard.
        source: File name for the message.

    Raises:
        TraceError: Naming the file and the first row that is wrong.
    """
    topk = header.topk
    refuse(node_counts < topk, source, f"a row must hold at least topk={topk} nodes")
    refuse(node_counts % topk != 0, source, f"nodes must come in groups of topk={topk} siblings")
    parents, depths, ranks = nodes["parents"], nodes["depths"], nodes["ranks"]
    columns = np.arange(parents.shape[1])
    real = columns < node_counts[:, None]
    refuse(
        real & ((depths < 1) | (depths > header.num_steps)),
        source,
        f"depths must be in [1, {header.num_steps}]",
        depths,
    )
    refuse(real & (ranks != columns % topk), source, "ranks must run from 0 in each group", ranks)
    is_first_group = columns < topk
    in_order = np.where(
        is_first_group, parents == NO_NODE, (parents >= 0) & (parents < columns - columns % topk)
    )
    refuse(
        real & ~in_order,
        source,
        "a parent must be a node of an earlier group, and -1 in the first group only",
        parents,
    )
    group_parents = parents[:, ::topk]
    refuse(
        real & (parents != np.repeat(group_parents, topk, axis=1)),
        source,
        "siblings must share one parent",
        parents,
    )
    above = np.where(parents >= 0, np.take_along_axis(depths, np.maximum(parents, 0), axis=1), 0)
    refuse(real & (depths != above + 1), source, "depth must be the parent's depth + 1", depths)
    # Padding gets distinct negative values, so that only real groups can collide.
    distinct = np.where(real[:, ::topk], group_parents, -2 - np.arange(group_parents.shape[1]))
    ordered = np.sort(distinct, axis=1)
    refuse(ordered[:, 1:] == ordered[:, :-1], source, "a node must not be expanded twice")


def check_node_values(trace: DenseTrace, source: str) -> None:
    """Check tokens, probabilities and the marked path of every node.

    Args:
        trace: One shard whose groups have been checked.
        source: File name for the message.

    Raises:
        TraceError: Naming the file and the first row that is wrong.
    """
    real = trace.depths > 0
    vocab = trace.header.vocab_size
    wrong_token = (trace.tokens < 0) | (trace.tokens >= vocab)
    refuse(real & wrong_token, source, f"tokens must be in [0, {vocab})", trace.tokens)
    text = trace.next_token
    refuse((text < 0) | (text >= vocab), source, f"next_token must be in [0, {vocab})", text)
    logs = trace.step_log_probs
    usable = np.isfinite(logs) & (logs <= 0)
    refuse(real & ~usable, source, "step_log_probs must be finite and at most 0", logs)
    risen = np.zeros_like(real)
    risen[:, 1:] = (logs[:, 1:] > logs[:, :-1]) & (trace.ranks[:, 1:] > 0)
    refuse(risen, source, "siblings must be ordered by step_log_probs, most probable first", logs)
    if trace.target_log_probs is not None:
        scores = trace.target_log_probs
        refuse(real & ~(scores <= 0), source, "target_log_probs must be at most 0", scores)
    spelled = spell_text(trace.tokens, trace.parents, trace.depths, text, trace.last_row)
    refuse(trace.on_path != spelled, source, "on_path must mark the nodes that spell the text")
    num_rows, width = spelled.shape
    per_group = spelled.reshape(num_rows, width // trace.num_children, trace.num_children)
    refuse(per_group.sum(axis=2) > 1, source, "siblings must not share a token")


def check_text_order(
    prompt_ids: npt.NDArray[np.str_],
    workloads: npt.NDArray[np.str_],
    position: npt.NDArray[np.int32],
    context_len: npt.NDArray[np.int64],
    source: str,
) -> None:
    """Check that whole prompts lie one after the other, position by position.

    Args:
        prompt_ids: [P] strings.
        workloads: [P] strings.
        position: [P] int32.
        context_len: [P] int64.
        source: File name for the message.

    Raises:
        TraceError: Naming the file and the first row that is wrong.
    """
    starts = position == 0
    if not len(position) or not starts[0]:
        raise TraceError(f"{source}: the first row must be position 0 of a prompt")
    new_prompt = np.append(True, prompt_ids[1:] != prompt_ids[:-1])
    refuse(starts != new_prompt, source, "a prompt must begin at position 0, and only there")
    step = np.append(0, np.diff(position))
    refuse(~starts & (step != 1), source, "positions must rise by 1", position)
    grown = np.append(0, np.diff(context_len))
    refuse(~starts & (grown != 1), source, "context_len must rise by 1 a position", context_len)
    refuse(context_len < 0, source, "context_len must be at least 0", context_len)
    moved = np.append(False, workloads[1:] != workloads[:-1])
    refuse(~starts & moved, source, "a prompt must keep its workload")
    names, counts = np.unique(prompt_ids[starts], return_counts=True)
    if (counts > 1).any():
        raise TraceError(f"{source}: prompt_id {str(names[counts > 1][0])!r} occurs twice")


def refuse(
    wrong: npt.NDArray[np.bool_], source: str, rule: str, values: npt.NDArray[Any] | None = None
) -> None:
    """Raise if any element is wrong.

    Args:
        wrong: [P] or [P, any] bool.
        source: File name for the message.
        rule: What is allowed.
        values: Values of the same shape as `wrong`, shown in the message.

    Raises:
        TraceError: Naming the file, the first wrong row and the value.
    """
    if not wrong.any():
        return
    where = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    shown = "" if values is None else f", got {values[where]!s}"
    column = f", node {where[1]}" if len(where) > 1 and values is not None else ""
    raise TraceError(f"{source}, row {where[0]}{column}: {rule}{shown}")
