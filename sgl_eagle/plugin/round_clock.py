"""Where the host's time goes in decode rounds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Stage = Literal["roots", "draft", "decide", "verify", "extend"]
"""What the host does: wait for the roots, run draft steps and wait for each, ask the policy and
pack trees, launch verify, launch draft-extend. The last two wait for nothing.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimes:
    """Host time of some rounds.

    Attributes:
        round_ct: How many.
        row_ct: Requests that decoded, added up over the rounds.
        stage_us: Microseconds of each stage, added up over the rounds.
    """

    round_ct: int
    row_ct: int
    stage_us: dict[str, float]

    def describe(self) -> str:
        """Means for a log line.

        Returns:
            E.g. "batch 8.0, host us a round: roots 110, draft 420, decide 130, ...".
        """
        parts = (f"{stage} {us / self.round_ct:.0f}" for stage, us in self.stage_us.items())
        return f"batch {self.row_ct / self.round_ct:.1f}, host us a round: {', '.join(parts)}"


class RoundClock:
    """Adds up the stages of rounds; a stage within another takes its time from the outer one."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """Start at zero.

        Args:
            now: Seconds on a clock that never goes back.
        """
        self._now = now
        self._since = 0.0
        self._open: list[Stage] = []
        self._seconds: dict[str, float] = {}
        self._taken_seconds: dict[str, float] = {}
        self._round_ct = 0
        self._row_ct = 0

    @contextlib.contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        """Count the time of a block.

        Args:
            name: The stage that it belongs to.

        Yields:
            None.
        """
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def end_round(self, num_rows: int) -> None:
        """Count a round.

        Args:
            num_rows: Requests that it decoded.
        """
        self._round_ct += 1
        self._row_ct += num_rows

    def take(self, min_rounds: int) -> RoundTimes | None:
        """What has been counted, once it is enough; counting starts anew.

        Args:
            min_rounds: Least number of rounds.

        Returns:
            The times; None as long as there are fewer rounds.
        """
        if self._round_ct < min_rounds:
            return None
        stage_us = {name: 1e6 * seconds for name, seconds in self._seconds.items()}
        for name, seconds in self._seconds.items():
            self._taken_seconds[name] = self._taken_seconds.get(name, 0.0) + seconds
        times = RoundTimes(round_ct=self._round_ct, row_ct=self._row_ct, stage_us=stage_us)
        self._seconds.clear()
        self._round_ct = self._row_ct = 0
        return times

    def total_us(self) -> dict[str, float]:
        """Everything that was ever counted, taken or not.

        Returns:
            Microseconds of each stage.
        """
        names = {*self._taken_seconds, *self._seconds}
        parts = (self._taken_seconds, self._seconds)
        return {name: 1e6 * sum(part.get(name, 0.0) for part in parts) for name in sorted(names)}

    def _switch(self) -> None:
        now = self._now()
        if self._open:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now
