"""Hands the steps of a server to the process that writes its traces."""

from __future__ import annotations

import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sgl_eagle.plugin.compat_requests import (
    cached_length,
    completion_length,
    custom_params,
    ends_at,
    last_token,
    sampling_of,
    shapes_its_text,
)
from sgl_eagle.plugin.finished_step import FinishedStep
from sgl_eagle.plugin.request_label import RequestLabel, read_label
from sgl_eagle.plugin.trace_messages import Message, RequestEnded, RequestStarted, StepRows
from sgl_eagle_harness.errors import OutputError
from sgl_eagle_harness.trace_schema import TraceHeader
from sgl_eagle_harness.trace_shard import SHARD_SUFFIX
from sgl_eagle_harness.types import NO_NODE, CandidateTrees, IntArray

logger = logging.getLogger(__name__)

MAX_QUEUED = 1024
"""Messages that may wait for the writing process; each holds a step of all requests."""
CLOSE_TIMEOUT_S = 20.0


class TraceRecorder:
    """Listens to finished steps and sends them on; what the scheduler's thread does is a copy.

    Attributes:
        dropped_ct: Messages lost because the queue was full.
        num_left_out: Requests of a dense recording whose text something else than the target
            decides, and which are not recorded.
    """

    def __init__(self, send: Callable[[Message], bool], *, dense: bool) -> None:
        """Start with no request.

        Args:
            send: Takes a message, or says that there is no room for it.
            dense: Whether all drafted nodes are recorded, or those verified.
        """
        self._send, self._dense = send, dense
        self._known: dict[str, bool] = {}
        self.dropped_ct = 0
        self.num_left_out = 0

    def observe(self, step: FinishedStep) -> None:
        """Record one step.

        Args:
            step: Its tokens have not been added to the requests yet.
        """
        rows = np.array(
            [row for row in np.flatnonzero(step.counted) if self._records(step.requests[row])],
            np.int64,
        )
        if not len(rows):
            return
        requests = [step.requests[row] for row in rows]
        trees, columns = self._nodes(step, rows)
        picked = np.where(columns == NO_NODE, 0, columns)
        at = (rows[:, None], picked)
        logs = trees.step_log_probs if self._dense else trees.path_log_confidence
        self._post(
            StepRows(
                rids=tuple(request.rid for request in requests),
                position=np.array([completion_length(request) for request in requests]),
                context_len=np.array([cached_length(request) for request in requests]),
                root_token=np.array([last_token(request) for request in requests]),
                emitted=step.emitted[rows, : int(step.num_accept_tokens[rows].max())],
                num_accept_tokens=step.num_accept_tokens[rows],
                columns=columns,
                tokens=trees.tokens[at],
                parents=trees.parents[at],
                depths=trees.depths[picked],
                log_probs=logs[at],
            )
        )

    def forget(self, rid: str) -> None:
        """Note the end of a request.

        Args:
            rid: Its name.
        """
        if self._known.pop(rid, False):
            self._post(RequestEnded(rid=rid))

    def _nodes(self, step: FinishedStep, rows: IntArray) -> tuple[CandidateTrees, IntArray]:
        if step.drafted is None:
            return CandidateTrees.empty(step.batch_size), np.empty((len(rows), 0), np.int64)
        trees = step.drafted.trees
        if not self._dense:
            return trees, step.drafted.columns[rows]
        return trees, np.where(trees.valid[rows], np.arange(trees.num_nodes), NO_NODE)

    def _records(self, request: Any) -> bool:
        known = self._known.get(request.rid)
        if known is None:
            known = self._known[request.rid] = self._start(request)
        return known

    def _start(self, request: Any) -> bool:
        if self._dense and shapes_its_text(request):
            self.num_left_out += 1
            logger.warning(
                "SGL_EAGLE does not record %s: a grammar, penalty, bias or filter decides its text",
                request.rid,
            )
            return False
        label = read_label(custom_params(request))
        if isinstance(label, str):
            logger.warning("SGL_EAGLE ignores the label of %s: %s", request.rid, label)
            label = RequestLabel()
        return self._post(
            RequestStarted(
                rid=request.rid,
                prompt_id=label.prompt_id or request.rid,
                workload=label.workload,
                prompts=label.prompts,
                sampling=sampling_of(request),
                ends_at=ends_at(request),
            )
        )

    def _post(self, message: Message) -> bool:
        sent = self._send(message)
        self.dropped_ct += not sent
        return sent


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
            [sys.executable, "-m", "sgl_eagle.plugin.trace_process", str(folder), stem],
            stdin=subprocess.PIPE,
        )
        self._queue: queue.Queue[object] = queue.Queue(MAX_QUEUED)
        self._queue.put(header.model_dump_json())
        stream = self._process.stdin
        assert stream is not None, "stdin is a pipe"
        self._thread = threading.Thread(target=self._forward, args=(stream,), daemon=True)
        self._thread.start()

    def send(self, message: Message) -> bool:
        """Queue a message.

        Args:
            message: For the process.

        Returns:
            False if the queue is full; the message is lost.
        """
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("SGL_EAGLE's trace is still being written")

    def _forward(self, stream: BinaryIO) -> None:
        try:
            while (message := self._queue.get()) is not None:
                pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
                if self._queue.empty():
                    stream.flush()
                self._queue.task_done()
            stream.close()
        except OSError as error:
            logger.warning("SGL_EAGLE records no more: its writing process ended: %s", error)


def _prepare_folder(folder: Path, header: TraceHeader) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {folder} for traces: {error}") from error
    if header.kind == "dense" and any(folder.glob(f"*{SHARD_SUFFIX}")):
        raise OutputError(f"{folder} holds a recording already: choose another folder or remove it")
