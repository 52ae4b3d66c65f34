"""What recording costs a server's scheduler: two servers that differ in --sgl-eagle-record.

    python tests/sglang_cpu/measure_recording.py [--target DIR --draft DIR] [--rounds N]

Each round asks both the same prompts, in alternating order. A round's tokens per second drift with
the machine by more than recording costs, so the scheduler's own thread is read too: the time that
Linux had it running, which neither waiting nor other processes add to. Without models the tiny pair
of the tests serves, whose steps are so short that recording shows. Prints one JSON object.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from policy_files import write_policies
from server_metrics import read_metrics
from server_process import MAX_RUNNING_REQUESTS, STAND_IN_ATTENTION, ForkServer

NUM_PROMPTS = 32
MAX_NEW_TOKENS = 48
SEED = 5


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--target", type=Path, help="default: the tiny pair")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--concurrency", type=int, default=MAX_RUNNING_REQUESTS)
    args = parser.parse_args()
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft go together")
    return args


def ask_all(server, prompts, concurrency):
    """Tokens per second of one round, and microseconds of the scheduler's thread for each step."""
    steps_before = read_metrics(server).get(("steps_total",), 0)
    busy_before, started = server.scheduler_thread_ns(), time.perf_counter()
    label = {"sgl_eagle": {"workload": "chat", "prompt_id": "any"}}
    answers = server.complete_all(
        prompts, concurrency=concurrency, max_new_tokens=MAX_NEW_TOKENS, custom_params=label
    )
    seconds = time.perf_counter() - started
    busy_us = (server.scheduler_thread_ns() - busy_before) / 1000
    time.sleep(0.5)  # the last step is counted once the scheduler finds nothing to do
    num_steps = read_metrics(server)["steps_total",] - steps_before
    num_tokens = sum(len(answer["output_ids"]) for answer in answers)
    return {"tok_per_s": num_tokens / seconds, "us_per_step": busy_us / num_steps}


def measure(folder, args):
    fork_server = ForkServer(folder / "fork_log", STAND_IN_ATTENTION)
    if args.target is None:
        fork_server.call("tiny_pair", "make_pair", str(folder))
    else:
        (folder / "target").symlink_to(args.target.resolve(strict=True))
        (folder / "draft").symlink_to(args.draft.resolve(strict=True))
    choose = random.Random(SEED)
    prompts = [[choose.randrange(2, 1024) for _ in range(12)] for _ in range(NUM_PROMPTS)]
    policy = str(write_policies(folder)["eagle2"])
    flags = ("--sgl-eagle-policy", policy, "--sleep-on-idle", "--enable-metrics")
    recording = ("--sgl-eagle-record", str(folder / "traces"))
    rounds = []
    with (
        fork_server.serve(folder, folder / "log_off", *flags) as off,
        fork_server.serve(folder, folder / "log_on", *flags, *recording) as on,
    ):
        for index in range(-1, args.rounds):
            order = [("off", off), ("on", on)][:: 1 if index % 2 else -1]
            answers = {name: ask_all(server, prompts, args.concurrency) for name, server in order}
            rounds += [answers] if index >= 0 else []  # the first warms up
    fork_server.close()
    return rounds


def summarize(rounds):
    """Medians over rounds, and of the differences and ratios of each."""

    def over_rounds(value):
        return statistics.median(map(value, rounds))

    added = sorted(each["on"]["us_per_step"] - each["off"]["us_per_step"] for each in rounds)
    return {
        "thread_us_per_step_off": over_rounds(lambda each: each["off"]["us_per_step"]),
        "thread_us_per_step_on": over_rounds(lambda each: each["on"]["us_per_step"]),
        "thread_us_per_step_added": {
            "median": statistics.median(added),
            "lowest": added[0],
            "highest": added[-1],
        },
        "tok_per_s_off": over_rounds(lambda each: each["off"]["tok_per_s"]),
        "tok_per_s_on": over_rounds(lambda each: each["on"]["tok_per_s"]),
        "tok_per_s_ratios": [
            round(each["on"]["tok_per_s"] / each["off"]["tok_per_s"], 3) for each in rounds
        ],
    }


def main():
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        rounds = measure(Path(name), args)
    settings = {"concurrency": args.concurrency, "rounds": args.rounds}
    return settings | {"pair": "given" if args.target else "tiny"} | summarize(rounds)


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))  # noqa: T201
