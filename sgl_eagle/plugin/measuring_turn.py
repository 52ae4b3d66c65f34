"""Servers of one machine take turns at measuring on one device.

Two that measure at once each find every round twice as long, or not, as it happens. The lock is
advisory, lies in the folder for temporary files and ends with the process.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 0.2


def device_name(device: str) -> str:
    """What tells a device from all others of the machine.

    Args:
        device: Where models run, e.g. "cuda" or "cpu".

    Returns:
        The UUID of the current GPU, also where processes see different numbers; else `device`.
    """
    if not device.startswith("cuda"):
        return device
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


@contextmanager
def measuring_turn(
    name: str,
    *,
    patience_s: float,
    folder: Path | None = None,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[bool]:
    """Wait until nobody else measures on a device, and measure.

    Args:
        name: Of the device.
        patience_s: Whoever has waited for so long goes on all the same, with a warning.
        folder: Where the lock lies; the one for temporary files by default.
        now: Seconds on a clock that never goes back.
        sleep: Waits for some seconds.

    Yields:
        Whether another one had its turn first.
    """
    path = (folder or Path(tempfile.gettempdir())) / f"sgl-eagle-measures-{name}.lock"
    descriptor, waited = None, False
    try:
        descriptor = _open(path)
        waited = _wait(descriptor, name, path, patience_s, now, sleep)
    except OSError as error:  # also of a file system that knows no locks
        logger.warning("SGL_EAGLE measures without a look at other servers: %s", error)
    try:
        yield waited
    finally:
        if descriptor is not None:
            # A child that was forked in the meantime holds the file, too.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _open(path: Path) -> int:
    # Without the right to write, which the file of another user does not give.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        return os.open(path, flags | os.O_CREAT, 0o644)


def _wait(
    descriptor: int,
    name: str,
    path: Path,
    patience_s: float,
    now: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    started, waits = now(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            return waits
        if now() - started >= patience_s:
            logger.warning(
                "SGL_EAGLE measures its costs although another server has measured on %s for %.0f "
                "s (%s is locked): times of both may be too long",
                *(name, patience_s, path),
            )
            return waits
        if not waits:
            waits = True
            logger.info("SGL_EAGLE waits for another server that measures its costs on %s", name)
        sleep(SECONDS_BETWEEN_LOOKS)
