"""What recording costs a serving scheduler, on a CPU.

    python tests/sglang_cpu/measure_recording.py [--target DIR --draft DIR]

Tokens per second of two servers, and even the time on a core of their schedulers, drift on a shared
machine by more than recording costs. So one server records, and its recorder adds up its own time:
that of the scheduler's thread, and that of the thread which writes under the same interpreter.
Steps that take fifty times their sum lose 2 % at most. Without models the tiny pair of the tests
serves; what is recorded does not depend on the size of a model. Prints one JSON object.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

from policy_files import write_policies
from recording_clock import FILE_VARIABLE
from server_process import STAND_IN_ATTENTION, ForkServer

BATCHES = (1, 8, 64)
PROMPTS_PER_REQUEST = 6
MAX_NEW_TOKENS = 48
SEED = 5
SHARE = 0.02
"""Of a step; what recording may cost."""


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--target", type=Path, help="default: the tiny pair")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    args = parser.parse_args()
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft go together")
    return args


def measure(folder, args):
    """A row for each number of requests at a time."""
    fork_server = ForkServer(folder / "fork_log", STAND_IN_ATTENTION)
    if args.target is None:
        fork_server.call("tiny_pair", "make_pair", str(folder))
    else:
        (folder / "target").symlink_to(args.target.resolve(strict=True))
        (folder / "draft").symlink_to(args.draft.resolve(strict=True))
    clock = folder / "clock.json"
    flags = (
        *("--sgl-eagle-policy", str(write_policies(folder)["eagle2"])),
        *("--sgl-eagle-record", str(folder / "traces"), "--sleep-on-idle"),
        *("--max-running-requests", str(max(args.batches)), "--max-total-tokens", "16384"),
    )
    choose = random.Random(SEED)
    rows = []
    with fork_server.serve(
        folder,
        folder / "log",
        *flags,
        fault="recording_clock.install",
        **{FILE_VARIABLE: str(clock)},
    ) as server:
        for batch in args.batches:
            count = batch * PROMPTS_PER_REQUEST
            prompts = [[choose.randrange(2, 1024) for _ in range(12)] for _ in range(count)]
            label = {"sgl_eagle": {"workload": "chat", "prompt_id": "any"}}
            before = json.loads(clock.read_text()) if clock.exists() else {}
            server.complete_all(
                prompts, concurrency=batch, max_new_tokens=MAX_NEW_TOKENS, custom_params=label
            )
            rows.append(_row(before, json.loads(clock.read_text())))
    fork_server.close()
    return rows


def _row(before, after):
    rise = {name: after[name] - before.get(name, 0) for name in after}
    recorder, sender, copy = (
        rise[f"{name}_ns"] / rise["steps"] / 1000 for name in ("recorder", "sender", "copy")
    )
    return {
        "steps": rise["steps"],
        "requests_per_step": round(rise["requests"] / rise["steps"], 1),
        "recorder_us_per_step": round(recorder, 1),
        "sender_us_per_step": round(sender, 1),
        "of_it_copy_us_per_step": round(copy, 1),
        "step_ms_that_loses_2_percent": round((recorder + sender) / SHARE / 1000, 2),
    }


def main():
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        return measure(Path(name), args)


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))  # noqa: T201
