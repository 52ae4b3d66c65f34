"""A real SGLang server on this machine's CPU, and what its answers are compared with."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
START_TIMEOUT_S = 180
COMPLETION_LENGTH = 32
CONTEXT_LENGTH = 512
MAX_RUNNING_REQUESTS = 8


def make_tiny_pair(folder: Path) -> None:
    """In a process of its own: Transformers warns, which must not fail a test.

    Args:
        folder: Gets `target` and `draft`.
    """
    _run_python(str(FOLDER / "tiny_pair.py"), str(folder))


def complete_with_hugging_face(target: Path, *, num_prompts: int) -> list[tuple[list[int], ...]]:
    source = (
        "import json, sys, torch; from transformers import AutoModelForCausalLM\n"
        "prompts, folder, length = json.load(sys.stdin), sys.argv[1], int(sys.argv[2])\n"
        "model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()\n"
        "def complete(prompt):\n"
        "    return model.generate(torch.tensor([prompt]), max_new_tokens=length,\n"
        "        do_sample=False, eos_token_id=None)[0, len(prompt):].tolist()\n"
        "print(json.dumps([complete(prompt) for prompt in prompts]))\n"
    )
    random_ids = random.Random(3)
    prompts = [
        [random_ids.randrange(2, 1024) for _ in range(random_ids.randrange(1, 20))]
        for _ in range(num_prompts)
    ]
    out = _run_python("-c", source, str(target), str(COMPLETION_LENGTH), stdin=json.dumps(prompts))
    return list(zip(prompts, json.loads(out), strict=True))


def exact_continuations(
    target: Path, prompt: list[int], *, length: int, temperature: float, top_k: int
) -> dict[tuple[int, ...], float]:
    """Probability of every continuation that the filter allows."""
    source = (
        "import json, sys, torch; from transformers import AutoModelForCausalLM\n"
        "prompt, length, temperature, top_k = json.load(sys.stdin)\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()\n"
        "paths = [([], 1.0)]\n"
        "for _ in range(length):\n"
        "    logits = model(torch.tensor([prompt + p for p, _ in paths])).logits[:, -1].double()\n"
        "    best, ids = (logits / temperature).topk(top_k)\n"
        "    rows = zip(paths, best.softmax(-1).tolist(), ids.tolist())\n"
        "    paths = [(p + [i], q * r) for (p, q), rs, js in rows for r, i in zip(rs, js)]\n"
        "print(json.dumps(paths))\n"
    )
    stdin = json.dumps([prompt, length, temperature, top_k])
    paths = json.loads(_run_python("-c", source, str(target), stdin=stdin))
    return {tuple(path): probability for path, probability in paths}


def reference_step_counts(pair: Path, policy: Path, prompts: list[list[int]]) -> list[int]:
    out = _run_python(
        *(str(FOLDER / "reference_steps.py"), str(pair), str(policy), str(COMPLETION_LENGTH)),
        stdin=json.dumps(prompts),
    )
    return list(json.loads(out))


def _run_python(*arguments: str, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server.

    Attributes:
        url: Its root.
        log: File with its output.
    """

    url: str
    log: Path

    def post(self, path: str, body: dict[str, Any]) -> Any:
        with self.open(path, body) as response:
            return json.load(response)

    def open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        return urllib.request.urlopen(request, timeout=120)

    def complete(self, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        parameters = {
            "temperature": 0,
            "max_new_tokens": COMPLETION_LENGTH,
            "ignore_eos": True,
        } | sampling
        return self.post("/generate", {"input_ids": prompt, "sampling_params": parameters})

    def complete_all(self, prompts: list[list[int]], *, concurrency: int) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(self.complete, prompts))

    def load(self) -> dict[str, Any]:
        """Requests and cache slots in use."""
        with self.open("/v1/loads") as response:
            return json.load(response)["loads"][0]

    def drain(self) -> dict[str, Any]:
        """Wait until nothing runs, empty the prefix cache and say what is still in use."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            load = self.load()
            if load["num_running_reqs"] == 0 and load["num_waiting_reqs"] == 0:
                break
            time.sleep(0.2)
        with self.open("/flush_cache", {}):
            return self.load()


def serving_command(pair: Path, *flags: str) -> list[str]:
    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(pair / "target"), "--device", "cpu", "--dtype", "float32"),
        # The check that would replace intel_amx by a backend without trees looks at the first flag.
        *("--attention-backend", "torch_native"),
        *("--prefill-attention-backend", "intel_amx"),
        *("--decode-attention-backend", "intel_amx"),
        *("--speculative-draft-attention-backend", "intel_amx"),
        *("--speculative-algorithm", "SGL_EAGLE"),
        *("--speculative-draft-model-path", str(pair / "draft")),
        *("--disable-cuda-graph", "--skip-server-warmup", "--mem-fraction-static", "0.2"),
        *("--max-total-tokens", "4096", "--context-length", str(CONTEXT_LENGTH)),
        *("--max-running-requests", str(MAX_RUNNING_REQUESTS), *flags),
    ]


def serving_environment(**variables: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(FOLDER / "stand_ins"), *filter(None, sys.path)]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **variables,
    }


@contextmanager
def serve(pair: Path, log: Path, *flags: str, **variables: str) -> Iterator[Server]:
    """Run a server until the block ends.

    Args:
        pair: Folder with `target` and `draft`.
        log: File for its output.
        *flags: Added to the command.
        **variables: Added to the environment.

    Yields:
        The server, healthy.
    """
    port = _free_port()
    command = [*serving_command(pair, *flags), "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=serving_environment(**variables),
            start_new_session=True,  # its workers must go with it
        )
        server = Server(url=f"http://127.0.0.1:{port}", log=log)
        try:
            _wait_until_healthy(server, process)
            yield server
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_until_healthy(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended:\n{_tail(server.log)}"
        try:
            with server.open("/health"):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise AssertionError(f"not healthy after {START_TIMEOUT_S} s:\n{_tail(server.log)}")


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-4000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def output_of_refused_start(pair: Path, log: Path, *flags: str, **variables: str) -> str:
    """Start a server that must not come up.

    Args:
        pair: Folder with `target` and `draft`.
        log: File for its output.
        *flags: Added to the command.
        **variables: Added to the environment.

    Returns:
        Its output.
    """
    command = [*serving_command(pair, *flags), "--host", "127.0.0.1", "--port", str(_free_port())]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=serving_environment(**variables),
            start_new_session=True,
        )
        try:
            assert process.wait(START_TIMEOUT_S) != 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return log.read_text(encoding="utf-8", errors="replace")
