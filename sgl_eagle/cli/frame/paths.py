"""Early checks of output paths, so that minutes of work do not end at an unwritable file."""

from __future__ import annotations

import tempfile
from pathlib import Path

from sgl_eagle_harness.errors import OutputError


def require_writable(path: Path, flag: str) -> None:
    """Refuse an output file that could not be written later. Creates nothing.

    Args:
        path: The file to be; missing parent folders are fine if they can be made.
        flag: The option that named it, for the message.

    Raises:
        OutputError: If the path is a folder, or its nearest existing parent is not a writable
            folder.
    """
    if path.is_dir():
        raise OutputError(f"{flag} must name a file, but {path} is a folder")
    _require_writable_folder(path.parent, path, flag)


def require_writable_folder(path: Path, flag: str) -> None:
    """Refuse an output folder that could not be filled later. Creates nothing.

    Args:
        path: The folder to be; it may be missing, as may its parents.
        flag: The option that named it, for the message.

    Raises:
        OutputError: If its nearest existing ancestor, or itself, is not a writable folder.
    """
    _require_writable_folder(path, path, flag)


def _require_writable_folder(folder: Path, path: Path, flag: str) -> None:
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise OutputError(f"{flag} {path} cannot be written: {nearest} is not a folder")
    try:
        # Only an attempt tells: permission bits say nothing to root or of read-only file systems.
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise OutputError(f"{flag} {path} cannot be written: {nearest}: {error.strerror}") from None
