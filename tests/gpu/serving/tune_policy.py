"""Tunes a policy file for one pair in SGLang: records what it drafts, then searches.

    python tests/gpu/serving/tune_policy.py --target DIR --draft DIR --out DIR \\
        [--prompts FILE ...] [--cost COSTS] -- SERVER FLAGS

A server records dense traces of the prompts' answers (its three speculative flags say how large
trees are drafted) and is stopped again; without --cost another one measures the costs. Then
`sgl-eagle tune` writes policy.json and tune.json to --out. A policy is of one pair, so a pair that
is served anywhere else needs a run of its own. Every part is a command of sgl-eagle, and is shown.
"""

from __future__ import annotations

import argparse
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from sgl_eagle.plugin.profile_command import stop_server
from sgl_eagle.reference.prompts import load_prompts, load_shipped_prompts, select_prompts
from sgl_eagle_harness.errors import SglEagleError
from sgl_eagle_harness.trace_store import read_dense_trace

START_TIMEOUT_S = 600
STOP_TIMEOUT_S = 60
POLL_S = 0.5
SHOWN_CHARACTERS = 3000
LIMITS = (
    *("--speculative-num-steps", "6", "--speculative-eagle-topk", "4"),
    *("--speculative-num-draft-tokens", "32"),
)


class TuningError(Exception):
    """A part that failed."""


def parse_arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument(
        "--prompts", type=Path, nargs="+", help="JSON lines (default: the shipped prompts)"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder, new")
    parser.add_argument(
        "--cost",
        type=Path,
        help="cost table of the pair, or the folder in which a server that is starting will leave "
        "its own (default: measure)",
    )
    parser.add_argument("--limit", type=int, default=12, help="prompts of each workload")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=16, help="prompts at a time")
    parser.add_argument("--batch-size", type=int, default=1, help="batch that is simulated")
    parser.add_argument("--trials", type=int, default=120)
    parser.add_argument("server_flags", nargs="*", metavar="-- FLAG", help="for both servers")
    return parser.parse_args(words)


def run_command(*words):
    """Run a command of sgl-eagle; its progress is seen."""
    command = [sys.executable, "-m", "sgl_eagle.cli", *map(str, words)]
    say(shlex.join(["sgl-eagle", *command[3:]]))
    if subprocess.run(command, check=False).returncode != 0:
        raise TuningError(f"sgl-eagle {words[0]} failed")


@contextmanager
def recording_server(args, traces):
    """Its URL, while a server records dense traces."""
    port = _free_port()
    flags = ["--sgl-eagle-record", str(traces), "--sgl-eagle-record-mode", "dense"]
    flags += ["--host", "127.0.0.1", "--port", str(port), "--skip-server-warmup"]
    command = [sys.executable, "-m", "sgl_eagle.cli", "serve", "--target", args.target]
    command += ["--draft", args.draft, "--", *LIMITS, *flags, *args.server_flags]
    say(shlex.join(["sgl-eagle", *command[3:]]))
    log = args.out / "recording.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(server, url, log)
        yield url
    finally:
        stop_server(server, timeout_s=STOP_TIMEOUT_S)


def _wait_until_healthy(server, url, log):
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(POLL_S)
    end = log.read_text(encoding="utf-8", errors="replace")[-SHOWN_CHARACTERS:]
    raise TuningError(f"the recording server did not start:\n{end}")


def wait_for_traces(traces, num_prompts):
    """A server writes what it recorded once it has been idle for some seconds."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    found = 0
    while time.monotonic() < deadline:
        try:
            found = len(read_dense_trace(traces).prompt_ids)
        except SglEagleError:
            found = 0
        if found >= num_prompts:
            return
        time.sleep(POLL_S)
    say(f"{traces} holds {found} of {num_prompts} prompts; the others were ended by the target")


def find_cost_table(path):
    """The table at a path; in a folder it is waited for."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while path.suffix != ".json":
        found = sorted(path.glob("*.json"))
        if found:
            return found[0]
        if time.monotonic() > deadline:
            raise TuningError(f"--cost {path} holds no cost table after {START_TIMEOUT_S} s")
        time.sleep(POLL_S)
    return path


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def say(text):
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


def main(words=None):
    args = parse_arguments(words)
    args.out.mkdir(parents=True)
    prompts = load_prompts(args.prompts) if args.prompts else load_shipped_prompts()
    prompts = select_prompts(prompts, split=None, per_workload=args.limit)
    files = ("--prompts", *args.prompts) if args.prompts else ()
    traces = args.out / "traces"
    with recording_server(args, traces) as url:
        run_command(
            *("record", "--engine", url, *files, "--limit", args.limit, "--rows", args.rows),
            *("--max-new-tokens", args.max_new_tokens),
        )
        wait_for_traces(traces, len(prompts))
    if args.cost is not None:
        cost = find_cost_table(args.cost)
    else:
        cost = args.out / "cost.json"
        pair = ("--target", args.target, "--draft", args.draft)
        flags = (*LIMITS, *args.server_flags)
        run_command("profile", "--engine", "sglang", *pair, "--out", cost, "--", *flags)
    run_command(
        *("tune", traces, "--cost", cost, "--out", args.out / "policy.json"),
        *("--result", args.out / "tune.json", "--batch-size", args.batch_size),
        *("--trials", args.trials),
    )


if __name__ == "__main__":
    main()
