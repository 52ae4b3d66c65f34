"""One Parquet shard: its header as JSON in the file's metadata, its rows in a fixed schema."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from sgl_eagle_harness.atomic_file import replace_when_done
from sgl_eagle_harness.errors import TraceError
from sgl_eagle_harness.records import describe_validation_error
from sgl_eagle_harness.trace_schema import HEADER_KEY, TRACE_SCHEMA_VERSION, TraceHeader

SHARD_SUFFIX = ".parquet"


def write_shard(path: Path, header: TraceHeader, table: pa.Table) -> None:
    """Write a table with its header, whole or not at all.

    Args:
        path: Final name.
        header: Provenance.
        table: Rows in one of the trace schemas.

    Raises:
        OutputError: If the file cannot be written.
    """
    table = table.replace_schema_metadata({HEADER_KEY: header.model_dump_json()})
    with replace_when_done(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def list_shards(paths: Path | Iterable[Path]) -> list[Path]:
    """Resolve folders to their shards.

    Args:
        paths: Shards, or folders of shards, or a mix.

    Returns:
        At least one path; a folder's shards come in the order of their names.

    Raises:
        TraceError: If a path does not exist or a folder has no shard.
    """
    shards: list[Path] = []
    for path in [paths] if isinstance(paths, Path) else paths:
        if path.is_dir():
            found = sorted(p for p in path.glob(f"*{SHARD_SUFFIX}") if not p.name.startswith("."))
            if not found:
                raise TraceError(f"{path} holds no trace: no file ends in {SHARD_SUFFIX}")
            shards += found
        elif path.exists():
            shards.append(path)
        else:
            raise TraceError(f"trace {path} does not exist")
    if not shards:
        raise TraceError("no trace was given")
    return shards


def read_header(path: Path) -> TraceHeader:
    """Read the provenance of one shard.

    Args:
        path: Shard.

    Returns:
        Its header.

    Raises:
        TraceError: If the file is damaged, not a trace, or of an unknown version.
    """
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowInvalid, OSError) as error:
        raise TraceError(f"{path} is truncated or not a Parquet file: {_reason(error)}") from error
    if HEADER_KEY not in metadata:
        raise TraceError(f"{path} is not a trace: its metadata has no {HEADER_KEY.decode()!r}")
    try:
        payload = json.loads(metadata[HEADER_KEY])
    except ValueError as error:
        raise TraceError(f"{path}: the trace header is not JSON: {error}") from error
    version = payload.get("schema_version") if isinstance(payload, dict) else None
    if version != TRACE_SCHEMA_VERSION:
        raise TraceError(
            f"{path}: schema_version must be {TRACE_SCHEMA_VERSION}, got schema_version={version!r}"
        )
    try:
        return TraceHeader.model_validate(payload)
    except ValidationError as error:
        raise TraceError(f"{path}: {describe_validation_error(error)}") from error


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    """Read the rows of one shard, with exactly the columns of `schema`.

    Args:
        path: Shard.
        schema: Expected columns and types.

    Returns:
        Table in one chunk a column.

    Raises:
        TraceError: If the file is damaged, or a column is missing, foreign, of another type or
            has a missing value.
    """
    try:
        table = pq.read_table(path, page_checksum_verification=True).combine_chunks()
    except (pa.ArrowInvalid, OSError) as error:
        raise TraceError(f"{path} is truncated or damaged: {_reason(error)}") from error
    if set(table.column_names) != set(schema.names):
        odd = sorted(set(table.column_names) ^ set(schema.names))
        raise TraceError(f"{path}: columns missing or unknown: {', '.join(odd)}")
    for name in schema.names:
        column = table.column(name)
        if column.type != schema.field(name).type:
            raise TraceError(
                f"{path}: column {name} must be {schema.field(name).type}, got {column.type}"
            )
        values = column.combine_chunks().values if pa.types.is_list(column.type) else column
        if column.null_count or values.null_count:
            raise TraceError(f"{path}: column {name} has missing values")
    return table


def _reason(error: Exception) -> str:
    # Arrow's messages run over several lines, the last of them empty.
    return " ".join(str(error).split())


def split_lists(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Take a list column apart.

    Args:
        column: List column without missing values.

    Returns:
        [P] int64 elements of each row, and all elements one after the other.
    """
    lists = column.combine_chunks()
    counts = np.diff(lists.offsets.to_numpy()).astype(np.int64)
    return counts, lists.flatten().to_numpy(zero_copy_only=False)
