"""Results on stdout, as text or JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from sgl_eagle_harness.errors import OutputError


def write_result(result: object, *, text: str, output_format: Literal["text", "json"]) -> None:
    """Print what a command found.

    Args:
        result: Dictionaries, lists, dataclasses, pydantic models, NumPy arrays and paths, nested
            freely; numbers must be finite, None stands for "not measured".
        text: The same, for people.
        output_format: `args.format`.

    Raises:
        BrokenPipeError: If nobody reads any more.
        OutputError: If stdout cannot be written, for example to a full disk.
    """
    if output_format == "json":
        text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False, default=_plain)
    try:
        print(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _abandon_stdout()
        raise
    except OSError as error:
        _abandon_stdout()
        raise OutputError(f"the result cannot be written to stdout: {error.strerror}") from None


def render_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align cells in columns; columns that hold only numbers align at the right.

    Args:
        headers: Column titles.
        rows: Formatted cells, as many in each row as there are titles.

    Returns:
        Lines joined by newlines, without a trailing one.
    """
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    flush_right = [
        bool(rows) and all(_is_number(cell) for cell in column[1:]) for column in columns
    ]
    lines = []
    for row in [headers, ["-" * width for width in widths], *rows]:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, flush_right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _abandon_stdout() -> None:
    """Keep the interpreter from failing a second time when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_number(cell: str) -> bool:
    if cell in {"", "not measured"}:
        return True
    try:
        float(cell.rstrip("%x").replace(",", ""))
    except ValueError:
        return False
    return True


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "model_dump"):  # pydantic and NumPy are recognised without importing them
        dumped: object = value.model_dump(mode="json")
        return dumped
    if hasattr(value, "tolist"):
        listed: object = value.tolist()
        return listed
    raise TypeError(f"{type(value).__name__} has no JSON form")
