"""A real SGLang server on this machine's CPU, started by the fork server."""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
# They end only what hangs: whatever else the machine does, it may take long.
START_TIMEOUT_S = 900
ANSWER_TIMEOUT_S = 300
STOP_TIMEOUT_S = 30
CLOSE_TIMEOUT_S = 120
COMPLETION_LENGTH = 32
CONTEXT_LENGTH = 512
SHORT_CONTEXT = 64
MAX_RUNNING_REQUESTS = 8

# The check that would replace intel_amx by a backend without trees looks at the first flag alone.
STAND_IN_ATTENTION = (
    *("--attention-backend", "torch_native"),
    *("--prefill-attention-backend", "intel_amx"),
    *("--decode-attention-backend", "intel_amx"),
    *("--speculative-draft-attention-backend", "intel_amx"),
)
TRITON_ATTENTION = ("--attention-backend", "triton")
TARGET_ATTENTION = ("--attention-backend", "intel_amx")


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server.

    Attributes:
        url: Its root.
        log: File with its output.
        answer_timeout_s: How long clients wait.
    """

    url: str
    log: Path
    answer_timeout_s: float = ANSWER_TIMEOUT_S

    def post(self, path: str, body: dict[str, Any]) -> Any:
        with self.open(path, body) as response:
            return json.load(response)

    def open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        return urllib.request.urlopen(request, timeout=self.answer_timeout_s)

    def complete(self, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        parameters = {
            "temperature": 0,
            "max_new_tokens": COMPLETION_LENGTH,
            "ignore_eos": True,
        } | sampling
        return self.post("/generate", {"input_ids": prompt, "sampling_params": parameters})

    def complete_all(
        self, prompts: list[list[int]], *, concurrency: int, **sampling: Any
    ) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, **sampling), prompts))

    def load(self) -> dict[str, Any]:
        """Requests and cache slots in use."""
        with self.open("/v1/loads") as response:
            return json.load(response)["loads"][0]

    def drain(self) -> dict[str, Any]:
        """Wait until nothing runs, empty the prefix cache and say what is still in use."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            load = self.load()
            if load["num_running_reqs"] == 0 and load["num_waiting_reqs"] == 0:
                # Refused while a step of requests that have ended is still on its way.
                with suppress(urllib.error.HTTPError), self.open("/flush_cache", {}):
                    return self.load()
            assert time.monotonic() < deadline, f"it still works on {load}"
            time.sleep(0.2)


class ForkServer:
    """Process of `fork_server.py`, to be left with `close`."""

    def __init__(self, log: Path, attention: tuple[str, ...], **variables: str) -> None:
        """Start it.

        Args:
            log: File for what it and called functions print.
            attention: Flags of its servers.
            **variables: Added to its environment, which its servers inherit.
        """
        self._log = log
        self._attention = attention
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(FOLDER / "fork_server.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=serving_environment(**variables),
            )

    def with_attention(self, attention: tuple[str, ...]) -> ForkServer:
        """The same process, whose servers have other attention.

        Args:
            attention: Flags of its servers.

        Returns:
            To be left with this one.
        """
        other = copy.copy(self)
        other._attention = attention
        return other

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(CLOSE_TIMEOUT_S)

    def call(self, module: str, function: str, *arguments: Any) -> Any:
        """What a function returns, called where SGLang and Transformers are imported already.

        Args:
            module: Its module, in this folder.
            function: Its name.
            *arguments: Made of JSON's types.

        Returns:
            What JSON keeps of the result.
        """
        with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
            request = {"call": [module, function, *arguments], "answer": answer.name}
            assert self._ask(request)["exit_code"] == 0, _tail(self._log)
            return json.load(answer)

    @contextmanager
    def serve(
        self,
        models: Path,
        log: Path,
        *flags: str,
        fault: str | None = None,
        drafts: bool = True,
        **variables: str,
    ) -> Iterator[Server]:
        """Run a server until the block ends.

        Args:
            models: Folder with `target` and `draft`.
            log: File for its output.
            *flags: Added to the command.
            fault: Function of `faults`, or of another module of this folder as MODULE.FUNCTION,
                that changes the server first.
            drafts: Whether it is ours; else SGLang serves the target alone.
            **variables: Added to the environment.

        Yields:
            The server, healthy.
        """
        with reserved_ports(2) as (port, port_of_ranks):
            ours = (*drafting_flags(models), *self._attention) if drafts else TARGET_ATTENTION
            command = [*serving_flags(models, port), "--nccl-port", str(port_of_ranks), *ours]
            pid = self._start([*command, *flags], log, variables, fault)
            server = Server(url=f"http://127.0.0.1:{port}", log=log)
            try:
                self._wait_until_healthy(server, pid)
                yield server
            finally:
                self._stop(pid)

    def output_of_refused_start(
        self, models: Path, log: Path, *flags: str, **variables: str
    ) -> str:
        """Start a server that must not come up.

        Args:
            models: Folder with `target` and `draft`.
            log: File for its output.
            *flags: Added to the command.
            **variables: Added to the environment.

        Returns:
            Its output.
        """
        with reserved_ports(1) as (port,):
            command = [*serving_flags(models, port), *drafting_flags(models), *self._attention]
            pid = self._start([*command, *flags], log, variables, None)
            try:
                deadline = time.monotonic() + START_TIMEOUT_S
                while self._exit_code(pid) is None:
                    assert time.monotonic() < deadline, f"it did not end:\n{_tail(log)}"
                    time.sleep(0.2)
                assert self._exit_code(pid) != 0
            finally:
                _kill_group(pid, signal.SIGKILL)
        return log.read_text(encoding="utf-8", errors="replace")

    def _start(
        self, command: list[str], log: Path, variables: dict[str, str], fault: str | None
    ) -> int:
        request = {"serve": command, "variables": variables, "log": str(log), "fault": fault}
        return int(self._ask(request)["pid"])

    def _exit_code(self, pid: int) -> int | None:
        return self._ask({"poll": pid})["exit_code"]

    def _wait_until_healthy(self, server: Server, pid: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self._exit_code(pid) is None, f"the server ended:\n{_tail(server.log)}"
            try:
                with server.open("/health"):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        raise AssertionError(f"not healthy after {START_TIMEOUT_S} s:\n{_tail(server.log)}")

    def _stop(self, pid: int) -> None:
        # At SIGTERM a server takes the end of its scheduler for a crash, and sleeps five seconds.
        _kill_group(pid, signal.SIGKILL)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self._exit_code(pid) is None:
            assert time.monotonic() < deadline, f"it did not end in {STOP_TIMEOUT_S} s"
            time.sleep(0.05)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        assert answer, f"the fork server ended:\n{_tail(self._log)}"
        return json.loads(answer)


def serving_flags(models: Path, port: int) -> list[str]:
    return [
        *("--model-path", str(models / "target"), "--device", "cpu", "--dtype", "float32"),
        *("--disable-cuda-graph", "--skip-server-warmup", "--mem-fraction-static", "0.2"),
        # Without work a scheduler would spin, and take a core from what the others do meanwhile.
        "--sleep-on-idle",
        *("--max-total-tokens", "4096", "--context-length", str(CONTEXT_LENGTH)),
        *("--max-running-requests", str(MAX_RUNNING_REQUESTS), "--host", "127.0.0.1"),
        *("--port", str(port)),
    ]


def drafting_flags(models: Path) -> tuple[str, ...]:
    return (
        *("--speculative-algorithm", "SGL_EAGLE"),
        *("--speculative-draft-model-path", str(models / "draft")),
    )


def serving_environment(**variables: str) -> dict[str, str]:
    folders = [str(FOLDER / "stand_ins"), str(FOLDER), *filter(None, sys.path)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # Healthy is who listens, which they do when all is loaded: a token would take a second.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        **variables,
    }


def _kill_group(pid: int, signal_number: int) -> None:
    with suppress(ProcessLookupError):  # its workers go with it
        os.killpg(pid, signal_number)


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-4000:]


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Ports that nobody else is given, of two releases that are tested at the same time.

    Args:
        count: How many.

    Yields:
        The ports. A server may bind them, since they are bound here without listening.
    """
    with ExitStack() as stack:
        holders = [stack.enter_context(socket.socket()) for _ in range(count)]
        for holder in holders:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
        yield [int(holder.getsockname()[1]) for holder in holders]
