"""Identity of a checkpoint, read from its files alone."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def checkpoint_digest(*files: Path, variant: str = "") -> str:
    """Identify a checkpoint by the sizes and first megabyte of its files.

    Args:
        files: Files that make up the checkpoint, in a fixed order.
        variant: What is made of them while they are loaded; empty for the files as they are.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for file in files:
        digest.update(json.dumps([file.name, file.stat().st_size]).encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 20))
    digest.update(variant.encode())
    return digest.hexdigest()
