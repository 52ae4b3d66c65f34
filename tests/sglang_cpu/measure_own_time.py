"""What a serving scheduler spends on the plugin's own work in a round, on a CPU.

    python tests/sglang_cpu/measure_own_time.py [--batches 1 8] [--policies eagle2 plain]

Reads the log lines in which a server says where its rounds spend the scheduler's thread. Between
rounds its models run, so that the same code takes several times as long as in a loop of its own.
`pack` lays trees out on the CPU itself, where a GPU launches a graph, and is left out. Prints a row
for each policy and number of requests: lower quartile and median of means of 40 rounds, since what
else the machine does only adds to them.
"""

import argparse
import json
import random
import re
import statistics
import tempfile
from pathlib import Path

from policy_files import write_policies
from server_process import STAND_IN_ATTENTION, ForkServer

STAGES = ("decide", "watch")
PROMPTS_PER_REQUEST = 2
MAX_NEW_TOKENS = 400
SEED = 5
LINE = re.compile(r"batch (?P<batch>[\d.]+), host us a round: (?P<stages>.*); own")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--policies", nargs="+", default=["eagle2", "plan", "plain"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    return parser.parse_args()


def stage_us(log, batch):
    """Microseconds of each stage, of the log lines of full batches."""
    found = {stage: [] for stage in STAGES}
    for match in LINE.finditer(log):
        if float(match["batch"]) >= 0.9 * batch:
            parts = dict(part.rsplit(" ", 1) for part in match["stages"].split(", "))
            for stage in STAGES:
                found[stage].append(float(parts.get(stage, 0.0)))
    return found


def serve(fork_server, folder, flags, batch):
    choose = random.Random(SEED)
    prompts = [
        [choose.randrange(2, 1024) for _ in range(12)] for _ in range(batch * PROMPTS_PER_REQUEST)
    ]
    log = folder / "log"
    with fork_server.serve(folder, log, *flags) as server:
        server.complete_all(prompts, concurrency=batch, max_new_tokens=MAX_NEW_TOKENS)
    return stage_us(log.read_text(encoding="utf-8", errors="replace"), batch)


def main():
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fork_server = ForkServer(folder / "fork_log", STAND_IN_ATTENTION)
        fork_server.call("tiny_pair", "make_pair", str(folder))
        policies = write_policies(folder)
        for policy in args.policies:
            for batch in args.batches:
                flags = (
                    *("--sgl-eagle-policy", str(policies[policy]), "--sleep-on-idle"),
                    *("--max-running-requests", str(batch), "--max-total-tokens", "32768"),
                )
                found = serve(fork_server, folder, flags, batch)
                row = {"policy": policy, "batch": batch, "lines": len(found[STAGES[0]])}
                for stage, us in found.items():
                    lower, middle, _ = statistics.quantiles(us, n=4)
                    row[f"{stage}_us"] = [round(lower), round(middle)]
                print(json.dumps(row), flush=True)  # noqa: T201
        fork_server.close()


if __name__ == "__main__":
    main()
