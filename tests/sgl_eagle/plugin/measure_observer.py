"""What watching a step costs the scheduler's thread, without a server.

    PYTHONPATH=tests/harness python tests/sgl_eagle/plugin/measure_observer.py

Steps of random trees, 5 levels of topk 4, 16 nodes verified. Prints medians in microseconds of a
step: counting alone; what recording adds; its frames, which another thread lays out under the same
interpreter lock; what learning adds; and one refresh of what was learnt, which comes every
`REFRESH_STEPS` steps.
"""

import json
import statistics
import time

import numpy as np
from fake_requests import FakeRequest, make_result
from fake_server import FakeServer, measure
from tree_maker import RandomDrafter

from sgl_eagle.plugin.builtin_policy import builtin_sizes, choose_builtin, load_prior
from sgl_eagle.plugin.finished_step import DraftedTrees
from sgl_eagle.plugin.node_learner import NodeLearner
from sgl_eagle.plugin.observer import StepObserver
from sgl_eagle.plugin.profile_grid import ProfileGrid
from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle.plugin.trace_frames import frame
from sgl_eagle.plugin.trace_recorder import TraceRecorder
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.policies.learning import REFRESH_STEPS, VerifiedRows
from sgl_eagle_harness.types import BatchContext, TreeLimits

LIMITS = TreeLimits(num_steps=5, topk=4, num_draft_tokens=16)
NUM_STEPS = 400


def random_step(batch_size, seed):
    ones = np.ones(batch_size, np.int64)
    batch = BatchContext(batch_size=batch_size, context_len=100 * ones, num_pending=ones)
    policy = Eagle2Policy(limits=LIMITS)
    trees = grow_trees(RandomDrafter(seed, batch_size), policy, batch)
    everyone = np.ones(trees.num_rows, np.bool_)
    columns = policy.select_verify(trees, batch)
    return DraftedTrees(trees=trees, columns=columns, speculating=everyone)


def make_policy():
    grid = ProfileGrid(
        batch_sizes=(1, 64), num_tokens=builtin_sizes(LIMITS), context_lens=(1, 512), width=4
    )
    table, _ = measure(FakeServer(), grid=grid)
    return choose_builtin(LIMITS, table, load_prior(), largest_batch=64).policy


def us_per_step(batch_size, *listeners):
    observer = StepObserver(
        clock=RoundClock(),
        runs_ahead=False,
        listeners=listeners,
        gauges=lambda _: {},
        export=lambda _: None,
    )
    requests = [FakeRequest(f"r{index}") for index in range(batch_size)]
    drafted = [random_step(batch_size, seed) for seed in range(8)]
    emitted = [[7, 8, 9]] * batch_size
    times = []
    for index in range(NUM_STEPS):
        result, kept = make_result(emitted), [len(row) - 1 for row in emitted]
        started = time.perf_counter()
        observer.drafted(drafted[index % len(drafted)])
        observer.launched(requests, result)
        observer.completed(kept)
        times.append(time.perf_counter() - started)
        for request in requests:
            request.output_ids += emitted[0]
    return 1e6 * statistics.median(times)


def refresh_us(policy):
    # One of so many steps in a row refreshes, and it is the longest.
    return 1e6 * statistics.median(max(step_times(policy)) for _ in range(9))


def step_times(policy):
    for _ in range(REFRESH_STEPS):
        started = time.perf_counter()
        policy.observe_step(make_rows())
        yield time.perf_counter() - started


def make_rows():
    return VerifiedRows.of_rows(
        batch_size=1,
        elapsed_us=1e4,
        depths=np.full(1, 3),
        num_draft_tokens=np.full(1, 8),
        num_correct_drafts=np.full(1, 2),
    )


def framing_us(messages):
    times = []
    for message in messages:
        started = time.perf_counter()
        frame(message)
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def main():
    rows = []
    for batch_size in (1, 8, 64):
        messages = []
        recorder = TraceRecorder(lambda m, kept=messages: kept.append(m) or True, dense=False)
        policy = make_policy()
        counting = us_per_step(batch_size)
        recording = us_per_step(batch_size, recorder)
        learning = us_per_step(batch_size, NodeLearner(policy))
        refresh = refresh_us(policy)
        rows.append(
            {
                "batch_size": batch_size,
                "counting_us": round(counting),
                "recording_us": round(recording - counting),
                "framing_us": round(framing_us(messages)),
                "learning_us": round(learning - counting),
                "refresh_us": round(refresh),
            }
        )
    return rows


if __name__ == "__main__":
    print(json.dumps(main()))  # noqa: T201
