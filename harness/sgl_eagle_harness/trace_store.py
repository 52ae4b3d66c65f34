"""Dense shards on disk: Parquet with the header as JSON in the file's metadata."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sgl_eagle_harness.dense_trace import (
    NODE_PADDING,
    DenseTrace,
    PromptTrace,
    link_children,
    merge_traces,
    spell_text,
)
from sgl_eagle_harness.errors import TraceError
from sgl_eagle_harness.trace_checks import (
    check_dense_header,
    check_node_groups,
    check_node_values,
    check_same_setup,
    check_text_order,
)
from sgl_eagle_harness.trace_schema import (
    NODE_COLUMNS,
    TARGET_COLUMN,
    TraceHeader,
    dense_schema,
)
from sgl_eagle_harness.trace_shard import (
    SHARD_SUFFIX,
    list_shards,
    read_header,
    read_table,
    split_lists,
    write_shard,
)

__all__ = [
    "SHARD_SUFFIX",
    "DenseTrace",
    "PromptTrace",
    "list_shards",
    "read_dense_trace",
    "read_header",
    "write_dense_shard",
]


def write_dense_shard(path: Path, header: TraceHeader, prompts: Sequence[PromptTrace]) -> None:
    """Write whole prompts as one shard, whole or not at all.

    Args:
        path: Final name; readers of a folder look for ".parquet".
        header: Provenance; kind must be "dense".
        prompts: At least one prompt.

    Raises:
        TraceError: If the prompts do not satisfy what a reader checks.
        OutputError: If the file cannot be written.
    """
    if not prompts:
        raise TraceError(f"{path}: a shard needs at least one prompt, got none")
    columns: dict[str, Any] = {
        "prompt_id": np.repeat([p.prompt_id for p in prompts], _lengths(prompts)),
        "workload": np.repeat([p.workload for p in prompts], _lengths(prompts)),
        "position": np.concatenate([np.arange(n, dtype=np.int32) for n in _lengths(prompts)]),
        "context_len": np.concatenate([p.context_len for p in prompts]).astype(np.int64),
        "next_token": np.concatenate([p.next_token for p in prompts]).astype(np.int32),
    }
    packed = [_pack_nodes(prompt, header.topk) for prompt in prompts]
    counts = np.concatenate([count for count, _ in packed])
    flat = {name: np.concatenate([nodes[name] for _, nodes in packed]) for name in packed[0][1]}
    _assemble(columns, counts, flat, header, str(path))
    schema = dense_schema(with_target_log_probs=TARGET_COLUMN in flat)
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    arrays = [pa.array(values) for values in columns.values()]
    arrays += [
        pa.ListArray.from_arrays(offsets, pa.array(flat[name]), type=schema.field(name).type)
        for name in schema.names[len(columns) :]
    ]
    write_shard(path, header, pa.table(arrays, schema=schema))


def read_dense_trace(
    paths: Path | Iterable[Path], workload: str | None = None, *, check: bool = True
) -> DenseTrace:
    """Read shards of one recording as one trace.

    Args:
        paths: Shards, or folders of shards, or a mix.
        workload: Keep only prompts of this workload.
        check: Whether to check every row; False only for shards that this process has written.

    Returns:
        All positions, in the order of the shards (folders: by file name).

    Raises:
        TraceError: If a shard is missing, damaged, of another version, unfit for replay or
            recorded differently from the first one; the message names the file, and the row
            where there is one.
    """
    traces: list[DenseTrace] = []
    shards = list_shards(paths)
    for path in shards:
        header = read_header(path)
        check_dense_header(header, str(path))
        if traces:
            check_same_setup(traces[0].header, header, (str(shards[0]), str(path)))
        traces.append(_read_dense_shard(path, header, check=check))
    trace = merge_traces(traces)
    if len(set(trace.prompt_ids)) < trace.num_prompts:
        twice = next(name for name in trace.prompt_ids if trace.prompt_ids.count(name) > 1)
        raise TraceError(f"prompt_id {twice!r} occurs in more than one of {_names(shards)}")
    return trace if workload is None else trace.select(workload=workload)


def _read_dense_shard(path: Path, header: TraceHeader, *, check: bool) -> DenseTrace:
    has_target = TARGET_COLUMN in pq.read_schema(path).names
    table = read_table(path, dense_schema(with_target_log_probs=has_target))
    place = {
        name: np.array(table.column(name).to_pylist(), np.str_)
        for name in ("prompt_id", "workload")
    }
    for name in ("position", "context_len", "next_token"):
        place[name] = table.column(name).to_numpy()
    counts, tokens = split_lists(table.column("tokens"))
    flat = {"tokens": tokens}
    for name in [*NODE_COLUMNS, *([TARGET_COLUMN] if has_target else [])][1:]:
        other, flat[name] = split_lists(table.column(name))
        if not np.array_equal(other, counts):
            row = int(np.argmax(other != counts))
            raise TraceError(f"{path}, row {row}: {name} and tokens differ in length")
    return _assemble(place, counts, flat, header, str(path), check=check)


def _assemble(
    place: dict[str, Any],
    counts: npt.NDArray[np.int64],
    flat: dict[str, npt.NDArray[Any]],
    header: TraceHeader,
    source: str,
    *,
    check: bool = True,
) -> DenseTrace:
    """Pad the rows, check them and derive what is not stored.

    Args:
        place: [P] arrays by column name.
        counts: [P] int64 nodes of each row.
        flat: [sum(counts)] arrays by column name.
        header: Header of the shard.
        source: File name for messages.
        check: Whether to check every row.

    Returns:
        The shard as a trace.
    """
    position = place["position"]
    if check:
        check_text_order(
            place["prompt_id"], place["workload"], position, place["context_len"], source
        )
    width = -(-int(counts.max(initial=1)) // header.topk) * header.topk
    filled = np.arange(width) < counts[:, None]
    nodes: dict[str, Any] = {}
    for name, values in flat.items():
        nodes[name] = np.full(filled.shape, NODE_PADDING[name], values.dtype)
        nodes[name][filled] = values
    if check:
        check_node_groups(counts, nodes, header, source)
    starts = np.flatnonzero(position == 0)
    trace = DenseTrace(
        header=header,
        **{"target_log_probs": None, **nodes},
        first_child=link_children(nodes["parents"], nodes["depths"], header.topk),
        context_len=place["context_len"],
        next_token=place["next_token"],
        prompt_index=(np.cumsum(position == 0) - 1).astype(np.int32),
        position=position,
        is_last=np.append(position[1:] == 0, True),
        prompt_ids=[str(name) for name in place["prompt_id"][starts]],
        prompt_workloads=[str(name) for name in place["workload"][starts]],
    )
    if check:
        check_node_values(trace, source)
    return trace


def _pack_nodes(
    prompt: PromptTrace, topk: int
) -> tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[Any]]]:
    """Drop the padding of one prompt's rows and derive ranks and the path.

    Args:
        prompt: Recorded prompt.
        topk: Size of a group of siblings.

    Returns:
        [n] int64 nodes of each row, and all nodes' columns one after the other.
    """
    real = prompt.depths > 0
    renumbered = np.cumsum(real, axis=1) - 1
    parents = prompt.parents.astype(np.int64)
    moved = np.take_along_axis(renumbered, np.clip(parents, 0, real.shape[1] - 1), axis=1)
    on_path = spell_text(
        prompt.tokens,
        prompt.parents,
        prompt.depths,
        prompt.next_token,
        np.full(len(prompt.next_token), len(prompt.next_token) - 1),
    )
    nodes: dict[str, npt.NDArray[Any]] = {
        "tokens": prompt.tokens[real].astype(np.int32),
        "parents": np.where(parents >= 0, moved, parents)[real].astype(np.int16),
        "depths": prompt.depths[real].astype(np.int8),
        "ranks": (renumbered % topk)[real].astype(np.int8),
        "step_log_probs": prompt.step_log_probs[real].astype(np.float32),
        "on_path": on_path[real],
    }
    if prompt.target_log_probs is not None:
        nodes[TARGET_COLUMN] = prompt.target_log_probs[real].astype(np.float32)
    return real.sum(axis=1), nodes


def _lengths(prompts: Sequence[PromptTrace]) -> list[int]:
    return [len(prompt.next_token) for prompt in prompts]


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(str(path) for path in paths)
