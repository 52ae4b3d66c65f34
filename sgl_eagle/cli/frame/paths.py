"""Early checks of output paths, so that minutes of work do not end at an unwritable file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from sgl_eagle.cli.frame.arguments import UsageError
from sgl_eagle_harness.errors import OutputError


def require_writable(path: Path, flag: str) -> None:
    """Refuse an output file that could not be written later. Creates nothing.

    Args:
        path: The file to be; missing parent folders are fine if they can be made.
        flag: The option that named it, for the message.

    Raises:
        OutputError: If the path is a folder, a device or a pipe, or its nearest existing parent
            is not a writable folder.
    """
    _require_writable_folder(Path(os.path.realpath(path)).parent, path, flag)
    if path.is_dir():
        raise OutputError(f"{flag} must name a file, but {path} is a folder")
    # A file is moved to its name when it is whole: that would put it in place of /dev/null.
    if path.exists() and not path.is_file():
        raise OutputError(f"{flag} must name a file, but {path} is a device or a pipe")


def require_not_read(path: Path, flag: str, source: str, inputs: Iterable[Path]) -> None:
    """Refuse an output file that would replace what the command reads.

    Args:
        path: The file to be.
        flag: The option that named it, for the message.
        source: The option or argument that named the inputs, for the message.
        inputs: Files, or folders whose files are read; they may be missing.

    Raises:
        OutputError: If the output is one of them.
    """
    for named in inputs:
        for file in named.iterdir() if named.is_dir() else [named]:
            same = file.samefile(path) if file.exists() and path.exists() else file == path
            if same:
                raise OutputError(f"{flag} {path} would replace what {source} names")


def require_writable_folder(path: Path, flag: str) -> None:
    """Refuse an output folder that could not be filled later. Creates nothing.

    Args:
        path: The folder to be; it may be missing, as may its parents.
        flag: The option that named it, for the message.

    Raises:
        OutputError: If its nearest existing ancestor, or itself, is not a writable folder.
    """
    _require_writable_folder(path, path, flag)


def require_empty_folder(path: Path, flag: str, *, instead: str = "choose another folder") -> None:
    """Refuse an output folder that holds something. Unlike a file, none is replaced unasked.

    Args:
        path: The folder to be; it may be missing.
        flag: The option that named it, for the message.
        instead: What the user can do, for the message.

    Raises:
        UsageError: If it holds anything.
    """
    if path.exists() and any(path.iterdir()):
        raise UsageError(f"{flag} {path} is not empty: {instead}")


def require_temporary_folder() -> None:
    """Refuse to begin where temporary files have no place.

    Raises:
        OutputError: If neither TMPDIR nor any usual folder can be written.
    """
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise OutputError(f"{error.strerror}; set TMPDIR to a folder that can be written") from None


def _require_writable_folder(folder: Path, path: Path, flag: str) -> None:
    nearest = folder
    try:
        path.exists()  # raises where a name is too long
        while not (nearest.exists() or nearest.is_symlink()) and nearest != nearest.parent:
            nearest = nearest.parent
        if not nearest.is_dir():
            raise OutputError(f"{flag} {path} cannot be written: {nearest} is not a folder")
        # Only an attempt tells: permission bits say nothing to root or of read-only file systems.
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{flag} {path} cannot be written: {nearest}: {error.strerror}") from None
