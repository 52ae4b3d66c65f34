"""Where the host's time goes in decode rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

Stage = Literal["decide", "roots", "draft", "wait", "pack", "verify", "extend", "watch"]
"""What the host does. For the models, as SGLang's own EAGLE does: take over the batch and plan the
draft's attention (roots), launch draft steps, verify and draft-extend. For the policy: see `OURS`.
And wait for the device, where a policy is asked within a round.
"""

OURS: tuple[Stage, ...] = ("decide", "pack", "watch")
"""What a server without us would not do. Decide: choose who drafts, ask the policy, and all that
no other stage of a round counts. Pack: copy drafts to the host, lay trees out or pack and send
them, keep what the draft has not seen. Watch: look at finished steps, to count, learn and record.
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
    stage_us: dict[Stage, float]

    @property
    def own_us(self) -> float:
        """Microseconds of the stages that are ours, added up over the rounds."""
        return sum(self.stage_us.get(stage, 0.0) for stage in OURS)

    def describe(self) -> str:
        """Means for a log line.

        Returns:
            E.g. "batch 8.0, host us a round: decide 130, roots 110, watch 20, ...; own 150".
        """
        parts = (f"{stage} {us / self.round_ct:.0f}" for stage, us in self.stage_us.items())
        return (
            f"batch {self.row_ct / self.round_ct:.1f}, host us a round: {', '.join(parts)}; "
            f"own {self.own_us / self.round_ct:.0f}"
        )


class RoundClock:
    """Adds up the stages of rounds; a stage within another takes its time from the outer one.

    Attributes:
        stage: Of a name, the stage, to be entered for the time of a block. A look-up and no
            method, since every round makes ten of them.
    """

    stage: Callable[[Stage], AbstractContextManager[None]]

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """Start at zero.

        Args:
            now: Seconds on a clock that never goes back.
        """
        self._now = now
        self._since = 0.0
        self._open = [_OpenStage(self)]  # the first stands for all that is outside of stages
        self._stages = _Stages(self)
        self.stage = self._stages.__getitem__
        self._round_ct = 0
        self._row_ct = 0

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
        now = self._now()
        self._open[-1].seconds += now - self._since
        self._since = now
        stage_us = {name: 1e6 * stage.take() for name, stage in self._stages.items()}
        times = RoundTimes(round_ct=self._round_ct, row_ct=self._row_ct, stage_us=stage_us)
        self._round_ct = self._row_ct = 0
        return times

    def total_us(self) -> dict[str, float]:
        """Everything that was ever counted, taken or not.

        Returns:
            Microseconds of each stage.
        """
        return {
            name: 1e6 * (stage.taken_seconds + stage.seconds)
            for name, stage in sorted(self._stages.items())
        }


class _Stages(dict[Stage, "_OpenStage"]):
    # Those that were ever entered, in the order of their first time.
    def __init__(self, clock: RoundClock) -> None:
        super().__init__()
        self._clock = clock

    def __missing__(self, name: Stage) -> _OpenStage:
        stage = self[name] = _OpenStage(self._clock)
        return stage


class _OpenStage:
    # A class, since a generator would take as long as what some stages count, and so would a call
    # that entering and leaving shared.
    __slots__ = ("_clock", "seconds", "taken_seconds")

    def __init__(self, clock: RoundClock) -> None:
        self._clock = clock
        self.seconds = self.taken_seconds = 0.0

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        self.taken_seconds += seconds
        return seconds

    def __enter__(self) -> None:
        clock = self._clock
        now, stages = clock._now(), clock._open
        stages[-1].seconds += now - clock._since
        stages.append(self)
        clock._since = now

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        clock = self._clock
        now = clock._now()
        self.seconds += now - clock._since
        clock._open.pop()
        clock._since = now
