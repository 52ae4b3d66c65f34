"""Folders for output: none is left empty, and one command at a time may fill one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from sgl_eagle_harness.errors import OutputError


@contextmanager
def make_folder(folder: Path) -> Iterator[None]:
    """Make a folder for what the block writes, and remove it again where it stays empty.

    Args:
        folder: May be there already; missing parents are made, and removed likewise.

    Yields:
        Nothing.

    Raises:
        OSError: If it cannot be made.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in made:
            with suppress(OSError):  # it holds something
                path.rmdir()


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Keep other commands from filling a folder until the block ends.

    The system forgets the lock with the process, however that ends, so that none is left behind.
    Where it knows no locks, or the file system none, nobody is kept out.

    Args:
        folder: For `make_folder`.

    Yields:
        Nothing.

    Raises:
        OutputError: If another command fills it, or it cannot be made.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(make_folder(folder))
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise OutputError(f"{folder} cannot be written: {error.strerror}") from error
        stack.callback(os.close, descriptor)
        _lock(descriptor, folder)
        yield


def _lock(descriptor: int, folder: Path) -> None:
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(
            f"{folder} is being filled by another command: wait for its end or choose another"
        ) from None
    except OSError:
        return
