"""The process that writes a server's traces.

    python -m sgl_eagle.plugin.trace_process FOLDER STEM HEADER

Its standard input holds frames of messages. It works through what it has received and closes its
files when the input ends, however the server ended.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import BinaryIO

from sgl_eagle.plugin.trace_files import TraceFiles
from sgl_eagle.plugin.trace_frames import read_message
from sgl_eagle.plugin.trace_messages import Message
from sgl_eagle_harness.trace_schema import TraceHeader

SECONDS_PER_ROTATION = 0.5


def main(arguments: list[str], stream: BinaryIO) -> int:
    """Write until the input ends.

    Args:
        arguments: Folder of the shards, the first part of their names, and the recording's
            header as JSON.
        stream: The server's end of it is closed when the server ends.

    Returns:
        0.
    """
    # A signal to the server's group must not keep its last steps from being written.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    folder, stem, header_json = arguments
    header = TraceHeader.model_validate_json(header_json)
    files = TraceFiles(Path(folder), header, stem=stem, now=time.monotonic)
    messages: SimpleQueue[Message | None] = SimpleQueue()
    threading.Thread(target=_receive, args=(stream, messages), daemon=True).start()
    while True:
        try:
            message = messages.get(timeout=SECONDS_PER_ROTATION)
            if message is None:
                break
            files.take(message)
        except Empty:
            pass
        files.rotate()
    files.close()
    return 0


def _receive(stream: BinaryIO, messages: SimpleQueue[Message | None]) -> None:
    try:
        while (message := read_message(stream)) is not None:
            messages.put(message)
    finally:
        messages.put(None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin.buffer))
