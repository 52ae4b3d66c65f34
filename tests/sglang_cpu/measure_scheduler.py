"""What a decode round takes of the scheduler's thread with plain SGLang and with ours, on a CPU.

    python tests/sglang_cpu/measure_scheduler.py [--batches 64 128] [--servers sglang plain eagle2]

Servers of the tiny pair add up their own time: planning the round (SGLang's
`get_next_batch_to_run`), running it without the models themselves (`run_batch`), and processing its
result. Arithmetic on tensors is part of that, where a GPU has it launched; but what is done once a
request, in Python, is the same. `--profile` names the functions, which slows them down. Prints a
row for each server and number of requests, in microseconds of a core a round.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

from policy_files import write_policies
from scheduler_clock import BATCH_VARIABLE, FILE_VARIABLE, PARTS, PROFILE_VARIABLE
from server_process import STAND_IN_ATTENTION, ForkServer

SGLANG = "sglang"
PROMPT_LENGTH = 12
MAX_NEW_TOKENS = 450
SEED = 5


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 128])
    parser.add_argument(
        "--servers",
        nargs="+",
        default=[SGLANG, "plain", "plan_plain"],
        help=f"{SGLANG} or policies of policy_files.py",
    )
    parser.add_argument("--profile", action="store_true", help="name the functions")
    return parser.parse_args()


def measure(fork_server, folder, name, batch, policies, *, profile):
    """Totals of full rounds."""
    clock = folder / f"{name}-{batch}.json"
    flags = ["--max-running-requests", str(batch), "--max-total-tokens", str(batch * 520)]
    if name != SGLANG:
        flags += ["--sgl-eagle-policy", str(policies[name])]
    choose = random.Random(SEED)
    prompts = [[choose.randrange(2, 1024) for _ in range(PROMPT_LENGTH)] for _ in range(batch)]
    variables = {FILE_VARIABLE: str(clock), BATCH_VARIABLE: str(batch)}
    if profile:
        variables[PROFILE_VARIABLE] = "1"
    with fork_server.serve(
        folder,
        folder / f"{name}-{batch}.log",
        *flags,
        fault="scheduler_clock.install",
        drafts=name != SGLANG,
        **variables,
    ) as server:
        server.complete_all(prompts, concurrency=batch, max_new_tokens=MAX_NEW_TOKENS)
    return json.loads(clock.read_text(encoding="utf-8"))


def main():
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        fork_server = ForkServer(folder / "fork_log", STAND_IN_ATTENTION)
        fork_server.call("tiny_pair", "make_pair", str(folder))
        policies = write_policies(folder)
        for batch in args.batches:
            for name in args.servers:
                found = measure(fork_server, folder, name, batch, policies, profile=args.profile)
                us = {part: found[f"{part}_ns"] / found["rounds"] / 1000 for part in PARTS}
                row = {"server": name, "batch": batch, "rounds": found["rounds"]}
                row |= {part: round(each) for part, each in us.items()}
                row["all"] = round(sum(us.values()))
                print(json.dumps(row), flush=True)  # noqa: T201
                if args.profile:
                    print("\n".join(found["functions"]), flush=True)  # noqa: T201
        fork_server.close()


if __name__ == "__main__":
    main()
