"""An engine process from outside: started, asked with a time limit, ended with all its children."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

SCRIPT = Path(__file__).with_name("engine_process.py")


class EngineError(Exception):
    """An engine that ended, or did not answer in time."""


class EngineHandle:
    """Owner of one engine process."""

    def __init__(self, name, arguments, environment, folder):
        self.name = name
        self.log = folder / f"{name}.log"
        arguments_file = folder / f"{name}.json"
        arguments_file.write_text(json.dumps(arguments), encoding="utf-8")
        commands_read, self._commands = os.pipe()
        self._answers, answers_write = os.pipe()
        with self.log.open("w") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, str(SCRIPT), str(arguments_file)),
                    *(str(commands_read), str(answers_write)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                pass_fds=(commands_read, answers_write),
                start_new_session=True,  # its workers must go with it
            )
        os.close(commands_read)
        os.close(answers_write)
        self._pending = b""

    def wait_until_ready(self, timeout_s):
        """Seconds that the engine took to start."""
        return self._read_answer(timeout_s)["start_s"]

    def complete(self, prompts, *, concurrency, sampling, timeout_s, logprobs=False):
        command = {
            "prompts": prompts,
            "concurrency": concurrency,
            "sampling": sampling,
            "logprobs": logprobs,
        }
        return self._ask({"complete": command}, timeout_s)

    def profile(self, prompts, *, sampling, folder, num_rounds, timeout_s):
        command = {
            "prompts": prompts,
            "sampling": sampling,
            "folder": str(folder),
            "num_rounds": num_rounds,
        }
        return self._ask({"profile": command}, timeout_s)

    @property
    def process_group(self):
        return self._process.pid

    def kill(self):
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def log_text(self):
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _ask(self, command, timeout_s):
        try:
            data = (json.dumps(command) + "\n").encode()
            while data:
                data = data[os.write(self._commands, data) :]
        except BrokenPipeError as error:
            raise EngineError(f"{self.name} has ended") from error
        return self._read_answer(timeout_s)

    def _read_answer(self, timeout_s):
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise EngineError(f"{self.name} did not answer in {timeout_s:.0f} s")
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise EngineError(f"{self.name} ended with {self._process.wait()}")
            self._pending += part
        line, self._pending = self._pending.split(b"\n", 1)
        return json.loads(line)
