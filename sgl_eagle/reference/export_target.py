"""Write a loaded target in Hugging Face format, which every release of transformers reads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from sgl_eagle.reference.loading import LoadedTarget
from sgl_eagle_harness.errors import OutputError


def export_target(loaded: LoadedTarget, folder: Path) -> None:
    """Write weights, configuration, tokenizer and chat template; the folder appears when whole.

    Args:
        loaded: The target; its weights are written in the type that they have.
        folder: Missing, or empty.

    Raises:
        OutputError: If the folder holds anything or cannot be written.
    """
    folder = folder.resolve()  # a link to an empty folder stays a link
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            loaded.model.save_pretrained(partial)
            loaded.tokenizer.save_pretrained(partial)
            partial.replace(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{folder}: cannot be written: {error}") from error
