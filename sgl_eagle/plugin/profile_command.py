"""Starts a server for the sake of the cost table that it measures at its start."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from sgl_eagle.plugin.server_flags import (
    COST_CACHE_VARIABLE,
    POLICY_VARIABLE,
    RECORD_MODE_VARIABLE,
    RECORD_VARIABLE,
)
from sgl_eagle_harness.cost_file import CostFile, load_cost_file
from sgl_eagle_harness.errors import CostTableError

START_TIMEOUT_S = 1800.0
POLL_S = 0.5
STOP_TIMEOUT_S = 30.0
SHOWN_LINES = 15
_GIVES_UP = ("could not be measured within", "by costs that it does not keep")
"""What a server logs that will leave no table."""


def profile_server(command: list[str], *, timeout_s: float = START_TIMEOUT_S) -> CostFile:
    """Run a server until it has measured its costs.

    Args:
        command: Starts SGLang with the plugin and without a policy file.
        timeout_s: Longest wait; models may take minutes to load.

    Returns:
        The table.

    Raises:
        CostTableError: If the server ends, serves without a table or by one that does not hold, or
            takes too long; shows the end of its log.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        costs = Path(folder) / "costs"
        with log.open("w", encoding="utf-8") as output:
            server = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(costs),
                start_new_session=True,  # its workers must go with it
            )
        try:
            return load_cost_file(_wait_for_table(server, costs, log, timeout_s))
        finally:
            stop_server(server)


def _environment(costs: Path) -> dict[str, str]:
    ours = (POLICY_VARIABLE, RECORD_VARIABLE, RECORD_MODE_VARIABLE)
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, COST_CACHE_VARIABLE: str(costs)}


def _wait_for_table(
    server: subprocess.Popen[bytes], costs: Path, log: Path, timeout_s: float
) -> Path:
    deadline = time.monotonic() + timeout_s
    while True:
        ended = server.poll() is not None
        found = sorted(costs.glob("*.json")) if costs.is_dir() else []
        if found:
            return found[0]
        text = log.read_text(encoding="utf-8", errors="replace")
        gave_up = any(sentence in text for sentence in _GIVES_UP)
        if ended or gave_up or time.monotonic() > deadline:
            shown = "\n".join(text.splitlines()[-SHOWN_LINES:])
            raise CostTableError(f"the server measured no cost table; its log ends with\n{shown}")
        time.sleep(POLL_S)


def stop_server(server: subprocess.Popen[bytes], *, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """End a server and all its processes.

    Args:
        server: Leads a process group of its own.
        timeout_s: How long it may take to end, before it is killed.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            server.wait(timeout_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
