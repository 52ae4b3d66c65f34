"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sgl_eagle_harness.errors import OutputError
from sgl_eagle_harness.output_folder import make_folder


@contextmanager
def replace_when_done(path: Path) -> Iterator[Path]:
    """Hand out a temporary name and move it to `path` when the block ends without an error.

    The temporary file lies in the same folder, so that the move is one rename. When the block
    raises, an interrupt included, the temporary file is removed and an older `path` stays.

    Args:
        path: Final name; missing parent folders are made. A link stays one, and the file that it
            names is replaced.

    Yields:
        Name to write to.

    Raises:
        OutputError: If the file cannot be written.
    """
    final = Path(os.path.realpath(path))  # unlike Path.resolve, no error for links in a circle
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        with make_folder(final.parent):
            try:
                yield temporary
                temporary.replace(final)
            finally:
                temporary.unlink(missing_ok=True)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error}") from error


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text to `path`, whole or not at all.

    Args:
        path: Final name; missing parent folders are made.
        text: What the file holds.

    Raises:
        OutputError: If the file cannot be written.
    """
    with replace_when_done(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
