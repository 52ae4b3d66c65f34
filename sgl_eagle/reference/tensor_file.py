"""Safetensors files that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sgl_eagle_harness.atomic_file import replace_when_done
from sgl_eagle_harness.errors import OutputError


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors, whole or not at all.

    Args:
        path: Final name; missing parent folders are made.
        tensors: Contiguous, sharing no memory.
        metadata: Kept beside them.

    Raises:
        OutputError: If the file cannot be written.
    """
    try:
        with replace_when_done(path) as temporary:
            save_file(
                dict(tensors), temporary, metadata=None if metadata is None else dict(metadata)
            )
    except SafetensorError as error:  # a full disk, too
        raise OutputError(f"cannot write {path}: {error}") from error
