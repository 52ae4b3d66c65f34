"""The bounded queue from a server's scheduler to the process that writes its traces."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from sgl_eagle.plugin.trace_frames import frame
from sgl_eagle.plugin.trace_messages import Unsent, UnsentStep
from sgl_eagle_harness.errors import OutputError
from sgl_eagle_harness.trace_schema import TraceHeader
from sgl_eagle_harness.trace_shard import SHARD_SUFFIX

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 256 << 20
"""Memory of steps that may wait for the writing process; at least a thousand of 64 requests."""
SECONDS_PER_WRITE = 0.1
"""Messages are collected for so long, since each write by the other thread takes the interpreter
from the scheduler's, and waking it costs the scheduler's own. A killed server loses them."""
CLOSE_TIMEOUT_S = 20.0

_BYTES_PER_WRITE = 8 << 20
"""Of memory that messages hold; after a stall, that of all is not freed at the end only."""
_PARTS_PER_CALL = 1024
"""Linux takes no more buffers in one call."""
_BYTES_PER_EVENT = 1000
"""Memory of a request's start or end, about."""


class TracePipe:
    """A bounded queue into a process of its own, which survives the server.

    The pipe ends when the server does, even if it is killed; the process then closes its files.
    """

    def __init__(self, folder: Path, header: TraceHeader) -> None:
        """Start the process.

        Args:
            folder: For the shards.
            header: Provenance of the recording.

        Raises:
            OutputError: If the folder cannot be made, or holds a dense recording already.
        """
        _prepare_folder(folder, header)
        stem = f"{header.kind}-{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}"
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sgl_eagle.plugin.trace_process"),
                *(str(folder), stem, header.model_dump_json()),
            ],
            stdin=subprocess.PIPE,
        )
        self._queue: queue.SimpleQueue[Unsent] = queue.SimpleQueue()
        # Each is written by one thread only, so that neither needs a lock.
        self._taken_bytes = self._written_bytes = 0
        self._closed = threading.Event()
        self._broken = False
        stream = self._process.stdin
        assert stream is not None, "stdin is a pipe"
        self._thread = threading.Thread(target=self._forward, args=(stream,), daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """Memory of the messages that the writing process has not been given yet, about."""
        return self._taken_bytes - self._written_bytes

    def send(self, message: Unsent) -> bool:
        """Queue a message; one thread may do so.

        Args:
            message: For the process; its arrays are read later, and must not be written again.

        Returns:
            False if the message is lost: the queue is full, or the process has ended.
        """
        num_bytes = _held_bytes(message)
        if self._broken or self.waiting_bytes + num_bytes > MAX_WAITING_BYTES:
            return False
        self._taken_bytes += num_bytes
        self._queue.put(message)
        return True

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._closed.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("SGL_EAGLE's trace is still being written")

    def _forward(self, stream: BinaryIO) -> None:
        try:
            with stream:
                closed = False
                while not closed:
                    # What was sent before the queue was closed is in it.
                    closed = self._closed.wait(SECONDS_PER_WRITE)
                    while not self._queue.empty():
                        self._write(stream)
        except OSError as error:
            self._broken = True
            self._drop_waiting()
            logger.warning(
                "SGL_EAGLE records no more: its writing process ended with code %s: %s",
                *(self._process.poll(), error),
            )

    def _write(self, stream: BinaryIO) -> None:
        parts: list[memoryview] = []
        num_bytes = 0
        while num_bytes < _BYTES_PER_WRITE and not self._queue.empty():
            message = self._queue.get_nowait()
            parts += frame(message)
            num_bytes += _held_bytes(message)
        _write_parts(stream.fileno(), parts)
        self._written_bytes += num_bytes

    def _drop_waiting(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()


def _write_parts(pipe: int, parts: list[memoryview]) -> None:
    # The kernel copies out of the arrays themselves, and meanwhile the scheduler's thread runs.
    for start in range(0, len(parts), _PARTS_PER_CALL):
        some = parts[start : start + _PARTS_PER_CALL]
        num_written = os.writev(pipe, some)
        rest = memoryview(b"")
        if num_written < sum(part.nbytes for part in some):  # a signal came between
            rest = memoryview(b"".join(some))[num_written:]
        while rest:
            rest = rest[os.write(pipe, rest) :]


def _held_bytes(message: Unsent) -> int:
    return message.num_bytes if isinstance(message, UnsentStep) else _BYTES_PER_EVENT


def _prepare_folder(folder: Path, header: TraceHeader) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {folder} for traces: {error}") from error
    if header.kind == "dense" and any(folder.glob(f"*{SHARD_SUFFIX}")):
        raise OutputError(f"{folder} holds a recording already: choose another folder or remove it")
