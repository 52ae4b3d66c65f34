"""Where the time goes in rounds that follow each other, as they do while serving.

A host that waited for the device at every stage would count its own time too, which a server hides
behind the round before. So boundaries of stages are marks in the device's stream, and are read once
the whole row has run. Between two marks lies what the device did; where the host is slower, also
how long the device waited for it. What the host takes to launch is read from its own clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import torch

from sgl_eagle.plugin.round_clock import RoundClock, RoundTimes, Stage


class Marks(Protocol):
    """Points in the time of a device.

    Attributes:
        host_runs_ahead: Whether launching work returns before it is done.
    """

    host_runs_ahead: bool

    def mark(self) -> Any:
        """Mark the end of the work that has been launched so far, and do not wait for it.

        Returns:
            The mark.
        """
        ...

    def wait(self) -> None:
        """Wait until the device has passed every mark."""
        ...

    def us_between(self, start: Any, end: Any) -> float:
        """Time between two marks that have been passed.

        Args:
            start: The earlier one.
            end: The later one.

        Returns:
            Microseconds.
        """
        ...


class HostMarks:
    """Marks of a device that is the host itself: work is done when it has been launched."""

    host_runs_ahead = False

    def mark(self) -> float:
        """Look at the clock.

        Returns:
            Seconds.
        """
        return time.perf_counter()

    def wait(self) -> None:
        """Return: there is nothing to wait for."""

    def us_between(self, start: float, end: float) -> float:
        """Time between two marks.

        Args:
            start: The earlier one.
            end: The later one.

        Returns:
            Microseconds.
        """
        return 1e6 * (end - start)


class StreamMarks:
    """Events in the CUDA stream that is current where this is made."""

    host_runs_ahead = True

    def __init__(self) -> None:
        """Take the stream."""
        self._stream = torch.cuda.current_stream()

    def mark(self) -> torch.cuda.Event:
        """Record an event.

        Returns:
            The event.
        """
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def wait(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()

    def us_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Time between two events that have been passed.

        Args:
            start: The earlier one.
            end: The later one.

        Returns:
            Microseconds, to half of one.
        """
        us: float = 1e3 * start.elapsed_time(end)
        return us


def marks_of(device: str) -> Marks:
    """The marks of a device.

    Args:
        device: Where models run, e.g. "cuda" or "cpu".

    Returns:
        Events of its current stream on a GPU.
    """
    return StreamMarks() if device.startswith("cuda") else HostMarks()


@dataclass(frozen=True, slots=True)
class _Span:
    round_index: int
    stage: Stage
    start: Any
    end: Any
    host_seconds: float


class RowClock(RoundClock):
    """Takes the stages of one row of rounds; what a stage within another takes is its own alone."""

    def __init__(self, marks: Marks, now: Callable[[], float] = time.perf_counter) -> None:
        """Start before the first round.

        Args:
            marks: Of the device.
            now: Seconds on the host's clock, which never goes back.
        """
        super().__init__(now)
        self._marks = marks
        self._latest: Any = None
        self._spans: list[_Span] = []
        self._entered: list[Stage] = []
        self.stage = partial(_MarkedStage, self)
        self._num_ended = 0

    def end_round(self, num_rows: int) -> None:
        """Count what has been launched since the round before to this one.

        Args:
            num_rows: Requests that it decoded.
        """
        del num_rows
        self._switch()
        self._num_ended += 1

    def take(self, min_rounds: int) -> RoundTimes | None:
        """Nothing: to look at the times while rounds run would wait for the device.

        Args:
            min_rounds: Of any number.

        Returns:
            None.
        """
        del min_rounds
        return None

    def rounds_us(self) -> list[dict[Stage, float]]:
        """Wait for the device, and read the marks.

        Returns:
            Microseconds of the stages of each round that has ended.
        """
        self._marks.wait()
        return self._summed(lambda span: self._marks.us_between(span.start, span.end))

    def launches_us(self) -> list[dict[Stage, float]]:
        """Read the host's clock.

        Returns:
            Microseconds that the host took for the stages of each round that has ended, to launch
            them alone where it runs ahead of the device.
        """
        return self._summed(lambda span: 1e6 * span.host_seconds)

    def _summed(self, us_of: Callable[[_Span], float]) -> list[dict[Stage, float]]:
        rounds: list[dict[Stage, float]] = [{} for _ in range(self._num_ended)]
        for span in self._spans:
            if span.round_index < self._num_ended:
                stages = rounds[span.round_index]
                stages[span.stage] = stages.get(span.stage, 0.0) + us_of(span)
        return rounds

    def _switch(self) -> None:
        host_seconds = self._now() - self._since
        mark = self._marks.mark()
        if self._entered:
            stage = self._entered[-1]
            self._spans.append(_Span(self._num_ended, stage, self._latest, mark, host_seconds))
        self._latest = mark
        self._since = self._now()  # a mark takes time, which no round that serves does


class _MarkedStage:
    __slots__ = ("_clock", "_name")

    def __init__(self, clock: RowClock, name: Stage) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._clock._switch()
        self._clock._entered.append(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._clock._switch()
        self._clock._entered.pop()
