"""Collects the steps of requests and writes those of finished ones, shard by shard."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sgl_eagle.plugin.request_label import LABEL_KEY, RequestLabel, read_label
from sgl_eagle.plugin.trace_assembly import (
    RecordedStep,
    contiguous_part,
    dense_prompt,
    ordinary_step,
    split_rows,
)
from sgl_eagle.plugin.trace_messages import Message, RequestEnded, RequestStarted
from sgl_eagle_harness.dense_trace import PromptTrace
from sgl_eagle_harness.errors import OutputError, TraceError
from sgl_eagle_harness.ordinary_trace import OrdinaryStep, write_ordinary_shard
from sgl_eagle_harness.trace_schema import PromptSource, SamplingParams, TraceHeader
from sgl_eagle_harness.trace_store import SHARD_SUFFIX, write_dense_shard

logger = logging.getLogger(__name__)

ROWS_PER_SHARD = 20_000
SECONDS_PER_SHARD = 60.0
"""Finished requests wait at most so long for their shard: what a machine that dies may lose."""
IDLE_S = 3.0
"""Without a message for so long, shards are closed early."""
IDLE_REQUEST_S = 600.0
"""A request without a step for so long has ended without a word."""


@dataclass(kw_only=True)
class _Running:
    started: RequestStarted
    label: RequestLabel
    seen: float
    steps: list[RecordedStep] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What all requests of one shard have in common."""

    sampling: SamplingParams
    prompts: str
    forced: bool


@dataclass(kw_only=True)
class _Waiting:
    """Finished requests on their way into one shard."""

    since: float
    num_rows: int = 0
    steps: list[OrdinaryStep] = field(default_factory=list)
    prompts: list[PromptTrace] = field(default_factory=list)


class TraceFiles:
    """Shards of one recording.

    A shard is written whole or not at all, so every file in the folder can be read whatever
    happens to the server.

    Attributes:
        num_shards: Written so far.
    """

    def __init__(
        self, folder: Path, header: TraceHeader, *, stem: str, now: Callable[[], float]
    ) -> None:
        """Open the recording; nothing is written yet.

        Args:
            folder: For the shards.
            header: Provenance; sampling, prompts and forced continuation are set for each shard.
            stem: First part of file names, unique among the recordings of the folder.
            now: Seconds on a clock that never goes back.
        """
        self._folder, self._header, self._stem, self._now = folder, header, stem, now
        self._running: dict[int, _Running] = {}
        self._waiting: dict[_Kind, _Waiting] = {}
        self._prompt_ids: set[str] = set()
        self._last_message = now()
        self.num_shards = 0

    def take(self, message: Message) -> None:
        """Keep one message.

        Args:
            message: In the order in which the server sent them.
        """
        now = self._last_message = self._now()
        if isinstance(message, RequestStarted):
            label = _label_of(message)
            self._running[message.number] = _Running(started=message, label=label, seen=now)
        elif isinstance(message, RequestEnded):
            if message.number in self._running:
                self._finish(self._running.pop(message.number))
        else:
            prompt_lens = {number: run.started.prompt_len for number, run in self._running.items()}
            for number, step in split_rows(message, prompt_lens):
                self._running[number].steps.append(step)
                self._running[number].seen = now

    def rotate(self) -> None:
        """Write the shards that are full or old enough, and all where nothing happens."""
        now = self._now()
        for number in [n for n, run in self._running.items() if now - run.seen > IDLE_REQUEST_S]:
            self._finish(self._running.pop(number))
        for kind, waiting in list(self._waiting.items()):
            old = now - waiting.since >= SECONDS_PER_SHARD
            idle = now - self._last_message >= IDLE_S
            if old or idle or waiting.num_rows >= ROWS_PER_SHARD:
                self._write(kind, self._waiting.pop(kind))

    def close(self) -> None:
        """Write everything, unfinished requests included."""
        while self._running:
            self._finish(self._running.popitem()[1])
        while self._waiting:
            self._write(*self._waiting.popitem())

    def _finish(self, run: _Running) -> None:
        if not run.steps:
            return
        started, label = run.started, run.label
        prompt_id = label.prompt_id or started.rid
        text = [int(token) for step in run.steps for token in step.emitted]
        forced = not set(started.ends_at).isdisjoint(text[:-1])
        sampling = SamplingParams.model_validate(started.sampling)
        kind = _Kind(sampling=sampling, prompts=label.prompts, forced=forced)
        waiting = self._waiting.setdefault(kind, _Waiting(since=self._now()))
        if self._header.kind == "ordinary":
            waiting.steps += [
                ordinary_step(step, prompt_id=prompt_id, workload=label.workload)
                for step in run.steps
            ]
            waiting.num_rows += len(run.steps)
            return
        steps = contiguous_part(run.steps, self._header.topk)
        if len(steps) < len(run.steps):
            logger.warning(
                "SGL_EAGLE keeps %d of %d positions of %s: a tree is missing",
                *(len(steps), len(run.steps), prompt_id),
            )
        if steps:
            unique_id = self._unique(prompt_id, started.rid)
            prompt = dense_prompt(steps, prompt_id=unique_id, workload=label.workload)
            waiting.prompts.append(prompt)
            waiting.num_rows += len(steps)

    def _unique(self, prompt_id: str, rid: str) -> str:
        taken = prompt_id in self._prompt_ids
        unique_id = f"{prompt_id}~{rid}" if taken else prompt_id
        self._prompt_ids.add(unique_id)
        return unique_id

    def _write(self, kind: _Kind, waiting: _Waiting) -> None:
        if not waiting.num_rows:
            return
        path = self._folder / f"{self._stem}-{self.num_shards:05d}{SHARD_SUFFIX}"
        header = self._header.model_copy(
            update={
                "sampling": kind.sampling,
                "prompts": PromptSource.model_validate({"kind": kind.prompts, "files": ()}),
                "forced_continuation": kind.forced,
            }
        )
        try:
            if header.kind == "ordinary":
                write_ordinary_shard(path, header, waiting.steps)
            else:
                write_dense_shard(path, header, waiting.prompts)
        except (TraceError, OutputError):
            logger.exception("SGL_EAGLE loses %d rows of its trace", waiting.num_rows)
            return
        self.num_shards += 1


def _label_of(started: RequestStarted) -> RequestLabel:
    label = read_label({LABEL_KEY: started.label})
    if isinstance(label, RequestLabel):
        return label
    logger.warning("SGL_EAGLE ignores the label of %s: %s", started.rid, label)
    return RequestLabel()
