"""What a round of a plan costs the scheduler's thread beside launches, without a server.

    PYTHONPATH=tests/harness python tests/sgl_eagle/plugin/measure_own_time.py

Rounds of EAGLE-2 trees, 5 levels of topk 4, 16 nodes verified, as a server without a policy file
runs them: the plan is asked, the trees of the round before are put together from its mail, counted
and learnt from. Prints medians in microseconds of a round, one part at a time. Launches of our own
are not in it; a server's log line counts them too.
"""

import json
import statistics
import time
from types import SimpleNamespace

import numpy as np
import torch
from fake_requests import FakeRequest, make_result
from fake_server import FakeServer, measure

from sgl_eagle.plugin.accept_alarm import AcceptAlarm
from sgl_eagle.plugin.builtin_policy import builtin_plan, builtin_sizes, load_prior
from sgl_eagle.plugin.foreseen_rounds import MAILS_KEPT, LateTrees
from sgl_eagle.plugin.host_transfer import HostTransfer
from sgl_eagle.plugin.node_learner import NodeLearner
from sgl_eagle.plugin.observer import StepObserver
from sgl_eagle.plugin.profile_grid import ProfileGrid
from sgl_eagle.plugin.request_tiers import RequestTiers
from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle.plugin.round_mail import RoundMail
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.policies.online_plan import OnlinePlanPolicy
from sgl_eagle_harness.round_shape import RoundShape
from sgl_eagle_harness.shared_rows import same_count
from sgl_eagle_harness.types import TreeLimits

LIMITS = TreeLimits(num_steps=5, topk=4, num_draft_tokens=16)
NUM_ROUNDS = 512
SHAPE = RoundShape(LIMITS.num_steps, LIMITS.num_draft_tokens)


class Deepest:
    """The learning plan, whatever it learns: rounds of its deepest and largest shape."""

    def __init__(self, policy):
        self._policy = policy
        self.limits = policy.limits

    def round_shape(self, batch_size, context_len):
        self._policy.round_shape(batch_size, context_len)
        return SHAPE

    def policy_of(self, shape):
        return self._policy.policy_of(shape)


def make_plan():
    grid = ProfileGrid(
        batch_sizes=(1, 128), num_tokens=builtin_sizes(LIMITS), context_lens=(1, 512), width=4
    )
    table, _ = measure(FakeServer(), grid=grid)
    prior = load_prior()
    edges = (1, 2, 4, 8, 16, 32, 64, 128)
    return OnlinePlanPolicy(
        builtin_plan(LIMITS, table, prior), prior.calibration, batch_edges=edges
    )


def random_mail(batch_size, rng):
    layout = RoundMail(branches=LIMITS.topk, num_steps=LIMITS.num_steps)
    mail = np.zeros((batch_size, layout.width), np.int32)
    mail[:, 0] = 100
    for index in range(LIMITS.num_steps):
        level = layout.level(mail, index)
        level[:, 0] = rng.permuted(
            np.broadcast_to(np.arange(100, 116).reshape(4, 4), level[:, 0].shape), axis=2
        )
        probs = rng.dirichlet(np.full(5, 0.5), level[:, 0].shape[:2])[:, :, :4]
        logs = np.log(np.maximum(probs, 1e-6)).astype(np.float32)
        level[:, 1] = (-np.sort(-logs, axis=2)).view(np.int32)
    for step in range(LIMITS.num_steps - 1):
        columns = 4 if step == 0 else 16
        every = np.broadcast_to(np.arange(columns), (batch_size, columns))
        layout.frontier(mail, step)[:] = rng.permuted(every, axis=1)[:, :4]
    return layout, torch.from_numpy(mail)


def measure_round(batch_size, *, learns):
    plan = make_plan()
    policy = Deepest(plan) if learns else Eagle2Policy(limits=LIMITS)
    listeners = (NodeLearner(plan),) if learns else ()
    observer = StepObserver(
        clock=RoundClock(),
        runs_ahead=False,
        listeners=listeners,
        patient=(AcceptAlarm(),),
        gauges=lambda _: {},
        export=lambda _: None,
    )
    rng = np.random.default_rng(batch_size)
    requests = [FakeRequest(f"r{index}") for index in range(batch_size)]
    batch = SimpleNamespace(
        reqs=requests,
        seq_lens_cpu=torch.full((batch_size,), 300),
        model_config=SimpleNamespace(context_len=4096),
    )
    tiers, names = RequestTiers(), [request.rid for request in requests]
    transfer = HostTransfer("cpu", MAILS_KEPT)
    mails = [random_mail(batch_size, rng) for _ in range(8)]
    times = {"decide": [], "look": []}
    for index in range(NUM_ROUNDS):
        layout, mail = mails[index % len(mails)]
        transfer.begin(index % MAILS_KEPT, mail)
        # One token to four: three drafts kept at most, none in a fourth of the rows.
        emitted = [[101, 102, 103, 104][: 1 + (index + row) % 4] for row in range(batch_size)]
        result, kept = make_result(emitted), [len(row) - 1 for row in emitted]
        started = time.thread_time()
        choice = tiers.choose(policy, batch, names, same_count(0, batch_size))
        assert choice.everyone
        decided = time.thread_time()
        observer.drafted(LateTrees(transfer, index % MAILS_KEPT, layout, choice.policy.limits))
        observer.launched(requests, result)
        observer.completed(kept)
        looked = time.thread_time()
        times["decide"].append(decided - started)
        times["look"].append(looked - decided)
        for request, tokens in zip(requests, emitted, strict=True):
            request.output_ids += tokens
    found = {f"{part}_us": round(1e6 * statistics.median(spent)) for part, spent in times.items()}
    mean = statistics.fmean(map(sum, zip(*times.values(), strict=True)))
    return found | {"mean_us": round(1e6 * mean)}


def main():
    return [
        {"batch_size": size, "policy": "plan" if learns else "eagle2"}
        | measure_round(size, learns=learns)
        for learns in (False, True)
        for size in (1, 16, 64, 128)
    ]


if __name__ == "__main__":
    for row in main():
        print(json.dumps(row))  # noqa: T201
