"""Ordinary traces: what an engine verified, one row a verify pass.

They show what happened under one policy. Nodes that it did not draft are missing, so other policies
cannot be replayed on them; readers of dense traces refuse them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sgl_eagle_harness.errors import TraceError
from sgl_eagle_harness.trace_checks import check_same_setup, refuse
from sgl_eagle_harness.trace_schema import TraceHeader, ordinary_schema
from sgl_eagle_harness.trace_shard import (
    list_shards,
    read_header,
    read_table,
    split_lists,
    write_shard,
)
from sgl_eagle_harness.types import NO_NODE, Float32Array, IntArray

_LISTS = ("tokens", "parents", "path_log_confidence", "accepted")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrdinaryStep:
    """One verify pass of one request.

    Attributes:
        prompt_id: Which prompt.
        workload: Its workload key.
        position: Completion tokens before the step, i.e. index of the first token it emits.
        context_len: Tokens before the root, root excluded.
        tokens: [M] int64 verified nodes, root first; the root alone is a plain step.
        parents: [M] int64, `NO_NODE` for the root, lower than the node for all others.
        path_log_confidence: [M] float32, 0 for the root.
        accepted: [num_correct_drafts] int64 accepted nodes, shallow to deep, root excluded.
        bonus_token: The token that the target added.
    """

    prompt_id: str
    workload: str
    position: int
    context_len: int
    tokens: IntArray
    parents: IntArray
    path_log_confidence: Float32Array
    accepted: IntArray
    bonus_token: int

    @property
    def num_accept_tokens(self) -> int:
        """Tokens the step emitted, bonus token included."""
        return len(self.accepted) + 1


def write_ordinary_shard(path: Path, header: TraceHeader, steps: Sequence[OrdinaryStep]) -> None:
    """Write the steps of finished requests as one shard, whole or not at all.

    Args:
        path: Final name; readers of a folder look for ".parquet".
        header: Provenance; kind must be "ordinary".
        steps: At least one step.

    Raises:
        TraceError: If there is no step or the steps do not satisfy what a reader checks.
        OutputError: If the file cannot be written.
    """
    if not steps:
        raise TraceError(f"{path}: a shard needs at least one step, got none")
    schema = ordinary_schema()
    columns = {
        name: pa.array([getattr(step, name) for step in steps], type=schema.field(name).type)
        for name in schema.names
    }
    table = pa.table(columns, schema=schema)
    _read_steps(table, header, str(path))
    write_shard(path, header, table)


def read_ordinary_trace(
    paths: Path | Iterable[Path],
) -> tuple[TraceHeader, list[OrdinaryStep]]:
    """Read shards of one recording.

    Args:
        paths: Shards, or folders of shards, or a mix.

    Returns:
        Header of the first shard, and all steps in the order of the shards.

    Raises:
        TraceError: If a shard is missing, damaged, dense, of another version or recorded
            differently from the first one; the message names the file, and the row where there is
            one.
    """
    shards = list_shards(paths)
    headers = [read_header(path) for path in shards]
    steps: list[OrdinaryStep] = []
    for path, header in zip(shards, headers, strict=True):
        check_same_setup(headers[0], header, (str(shards[0]), str(path)))
        steps += _read_steps(read_table(path, ordinary_schema()), header, str(path))
    return headers[0], steps


def _read_steps(table: pa.Table, header: TraceHeader, source: str) -> list[OrdinaryStep]:
    if header.kind != "ordinary":
        raise TraceError(f"{source}: kind must be 'ordinary', got kind={header.kind!r}")
    flat: dict[str, npt.NDArray[Any]] = {}
    counts: dict[str, npt.NDArray[np.int64]] = {}
    for name in _LISTS:
        counts[name], flat[name] = split_lists(table.column(name))
    for name in ("parents", "path_log_confidence"):
        refuse(counts[name] != counts["tokens"], source, f"{name} and tokens differ in length")
    refuse(counts["tokens"] < 1, source, "a step must hold its root")
    bounds = {
        name: np.concatenate([[0], np.cumsum(counts[name])]) for name in ("tokens", "accepted")
    }
    _check_nodes(counts, flat, header.vocab_size, source)
    rows = table.select(["prompt_id", "workload", "position", "context_len", "bonus_token"])
    steps = []
    for row, (nodes, taken) in zip(
        rows.to_pylist(),
        zip(pairwise(bounds["tokens"]), pairwise(bounds["accepted"]), strict=True),
        strict=True,
    ):
        node, kept = slice(*nodes), slice(*taken)
        steps.append(
            OrdinaryStep(
                **row,
                tokens=flat["tokens"][node].astype(np.int64),
                parents=flat["parents"][node].astype(np.int64),
                path_log_confidence=flat["path_log_confidence"][node],
                accepted=flat["accepted"][kept].astype(np.int64),
            )
        )
    for index, step in enumerate(steps):
        _check_path(step, f"{source}, row {index}")
    return steps


def _check_nodes(
    counts: dict[str, npt.NDArray[np.int64]],
    flat: dict[str, npt.NDArray[Any]],
    vocab_size: int,
    source: str,
) -> None:
    """Check all nodes of a shard at once.

    Args:
        counts: [P] list lengths by column.
        flat: All list elements by column.
        vocab_size: Tokens must be below it.
        source: File name for messages.
    """
    row_of = np.repeat(np.arange(len(counts["tokens"])), counts["tokens"])
    starts = np.cumsum(counts["tokens"]) - counts["tokens"]
    index = np.arange(len(row_of)) - starts[row_of]
    tokens, parents, logs = (flat[name] for name in _LISTS[:3])
    in_order = np.where(index == 0, parents == NO_NODE, (parents >= 0) & (parents < index))
    for wrong, rule in (
        ((tokens < 0) | (tokens >= vocab_size), f"tokens must be in [0, {vocab_size})"),
        (~in_order, "node 0 must be the root and every parent an earlier node"),
        (~(logs <= 0), "path_log_confidence must be at most 0"),
    ):
        rows = np.zeros(len(counts["tokens"]), np.bool_)
        rows[row_of[wrong]] = True
        refuse(rows, source, rule)


def _check_path(step: OrdinaryStep, place: str) -> None:
    above = 0
    for node in step.accepted.tolist():
        if not 0 < node < len(step.tokens) or step.parents[node] != above:
            raise TraceError(f"{place}: accepted must be a path from the root, got node {node}")
        above = node
