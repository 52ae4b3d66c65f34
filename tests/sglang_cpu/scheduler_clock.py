"""Times what a decode round takes of a scheduler's thread; put into a server before it starts."""

from __future__ import annotations

import contextlib
import cProfile
import functools
import io
import json
import os
import pstats
import time
from pathlib import Path

import overlap

FILE_VARIABLE = "SCHEDULER_CLOCK_FILE"
BATCH_VARIABLE = "SCHEDULER_CLOCK_BATCH"
PROFILE_VARIABLE = "SCHEDULER_CLOCK_PROFILE"
"""Set to look at single functions, which takes several times as long as they do."""
ROUNDS_PER_WRITE = 32
PARTS = ("get_next_batch_to_run", "run_batch", "process_batch_result")
"""Methods of SGLang's scheduler, called once a round each."""
MOST_FUNCTIONS = 60


def install():
    """Write to the file that a variable names what full decode rounds take.

    All are time on a core, added up over `rounds`. `forward_ns` is that of the models, which run
    where a GPU would have them launched; `run_batch_ns` leaves it out. Steps overlap.
    """
    overlap.install()
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

    clock = SchedulerClock(Path(os.environ[FILE_VARIABLE]), int(os.environ[BATCH_VARIABLE]))
    plan, *others = PARTS
    setattr(Scheduler, plan, clock.beginning(getattr(Scheduler, plan), plan))
    for part in others:
        setattr(Scheduler, part, clock.timed(getattr(Scheduler, part), part))
    ModelRunner.forward = clock.timed(ModelRunner.forward, "forward", profiled=False)


class SchedulerClock:
    """Adds up the parts of rounds in which all requests decode."""

    def __init__(self, path, batch_size):
        self._path, self._batch_size = path, batch_size
        self._totals = dict.fromkeys(("rounds", *(f"{part}_ns" for part in (*PARTS, "forward"))), 0)
        self._profile = cProfile.Profile() if os.environ.get(PROFILE_VARIABLE) else None
        self._is_full = False

    def beginning(self, call, part):
        """Begin a round before a call, which is timed."""
        timed = self.timed(call, part)

        @functools.wraps(call)
        def run(scheduler, *arguments, **more):
            # As the round before, since who runs is known only once it is planned.
            latest = scheduler.last_batch
            self._is_full = (
                latest is not None
                and latest.forward_mode.is_decode()
                and len(latest.reqs) == self._batch_size
                and not scheduler.waiting_queue
            )
            self._totals["rounds"] += self._is_full
            if self._is_full and self._totals["rounds"] % ROUNDS_PER_WRITE == 0:
                self._write()
            return timed(scheduler, *arguments, **more)

        return run

    def timed(self, call, part, *, profiled=True):
        """Time a call in full rounds, and look into it or leave it out of what it is part of."""

        @functools.wraps(call)
        def run(*arguments, **more):
            if not self._is_full:
                return call(*arguments, **more)
            with self._profiling(profiled):
                started = time.thread_time_ns()
                result = call(*arguments, **more)
                self._totals[f"{part}_ns"] += time.thread_time_ns() - started
            return result

        return run

    @contextlib.contextmanager
    def _profiling(self, inside):
        if self._profile is None:
            yield
            return
        self._profile.enable() if inside else self._profile.disable()
        yield
        self._profile.disable() if inside else self._profile.enable()

    def _write(self):
        found = dict(self._totals)
        # The round that begins now has only been counted.
        found["rounds"] -= 1
        found["run_batch_ns"] -= found["forward_ns"]
        found["functions"] = [] if self._profile is None else describe(self._profile)
        self._path.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
        self._path.with_suffix(".part").replace(self._path)


def describe(profile):
    """The functions that took most themselves, one a line."""
    lines = io.StringIO()
    pstats.Stats(profile, stream=lines).sort_stats("tottime").print_stats(MOST_FUNCTIONS)
    return lines.getvalue().splitlines()
