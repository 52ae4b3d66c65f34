"""What recording costs: two servers that differ in --sgl-eagle-record, asked in turns.

    python tests/sglang_cpu/measure_recording.py TARGET DRAFT [ROUNDS]

The machine drifts, so each round asks both, in alternating order, and the ratio of a round is what
counts. Prints one JSON object.
"""

import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from policy_files import write_policies
from server_process import STAND_IN_ATTENTION, ForkServer

from sgl_eagle.reference.prompts import load_shipped_prompts

CONCURRENCY = 4
NUM_PROMPTS = 12
MAX_NEW_TOKENS = 48


def ask_all(server, prompts):
    """Tokens per second of one round."""

    def ask(prompt):
        body = {
            "model": "any",
            "messages": [{"role": "user", "content": prompt.turns[0]}],
            "temperature": 0,
            "max_tokens": MAX_NEW_TOKENS,
            "custom_params": {"sgl_eagle": {"workload": prompt.workload, "prompt_id": prompt.id}},
        }
        return server.post("/v1/chat/completions", body)["usage"]["completion_tokens"]

    started = time.perf_counter()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        num_tokens = sum(pool.map(ask, prompts))
    return num_tokens / (time.perf_counter() - started)


def main(target, draft, num_rounds):
    prompts = load_shipped_prompts(("chat", "code", "qa"), "held_out")[:NUM_PROMPTS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "target").symlink_to(Path(target).resolve())
        (folder / "draft").symlink_to(Path(draft).resolve())
        policies = write_policies(folder)
        fork_server = ForkServer(folder / "fork_log", STAND_IN_ATTENTION)
        flags = ("--sgl-eagle-policy", str(policies["eagle2"]), "--sleep-on-idle")
        recording = ("--sgl-eagle-record", str(folder / "traces"))
        with (
            fork_server.serve(folder, folder / "log_off", *flags) as off,
            fork_server.serve(folder, folder / "log_on", *flags, *recording) as on,
        ):
            rounds = []
            for index in range(-1, num_rounds):
                order = [("off", off), ("on", on)][:: 1 if index % 2 else -1]
                speeds = {name: ask_all(server, prompts) for name, server in order}
                rounds += [speeds] if index >= 0 else []  # the first warms up
        fork_server.close()
    ratios = [speeds["on"] / speeds["off"] for speeds in rounds]
    return {
        "tok_per_s_off": statistics.median(speeds["off"] for speeds in rounds),
        "tok_per_s_on": statistics.median(speeds["on"] for speeds in rounds),
        "median_ratio": statistics.median(ratios),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


if __name__ == "__main__":
    num_rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 7
    print(json.dumps(main(sys.argv[1], sys.argv[2], num_rounds)))  # noqa: T201
