"""Times what recording takes of a server's scheduler; put into the server before it starts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from sgl_eagle.plugin import trace_pipe
from sgl_eagle.plugin.trace_recorder import TraceRecorder

FILE_VARIABLE = "RECORDING_CLOCK_FILE"
STEPS_PER_WRITE = 16


def install():
    """Let the recorder add up its time, and write it to the file that a variable names.

    `recorder_ns` is of the scheduler's thread. `sender_ns` is of the thread that writes to the
    other process, which may keep the scheduler's waiting for the interpreter; `copy_ns` is the part
    of it in which the kernel copies and the interpreter is free. All are time on a core.
    """
    totals = {"steps": 0, "requests": 0, "recorder_ns": 0, "sender_ns": 0, "copy_ns": 0}
    path = Path(os.environ[FILE_VARIABLE])

    def timed(call, name):
        def run(*arguments, **more):
            started = time.thread_time_ns()
            try:
                return call(*arguments, **more)
            finally:
                totals[name] += time.thread_time_ns() - started

        return run

    observe = timed(TraceRecorder.observe, "recorder_ns")

    def count(self, step):
        observe(self, step)
        totals["steps"] += 1
        totals["requests"] += len(step.requests)
        if totals["steps"] % STEPS_PER_WRITE == 0:
            path.with_suffix(".part").write_text(json.dumps(totals), encoding="utf-8")
            path.with_suffix(".part").replace(path)

    TraceRecorder.observe = count
    TraceRecorder.forget = timed(TraceRecorder.forget, "recorder_ns")
    trace_pipe.TracePipe._write = timed(trace_pipe.TracePipe._write, "sender_ns")
    trace_pipe._write_parts = timed(trace_pipe._write_parts, "copy_ns")
