"""Replay speed on one core; the figures are those that the tuner's run time is planned with."""

import time
from dataclasses import replace

import pytest

from sgl_eagle_harness.dense_trace import DenseTrace, merge_traces
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.policies.static import StaticPolicy
from sgl_eagle_harness.types import TreeLimits
from sgl_eagle_tuner.replay import replay_positions
from sgl_eagle_tuner.search_space import PointBuilder, PricePoint

NUM_COPIES = 24
STATIC_POSITIONS_PER_S = 200_000
EAGLE2_POSITIONS_PER_S = 100_000
PRICE_POSITIONS_PER_S = 30_000


@pytest.fixture(scope="module")
def trace(record, tmp_path_factory) -> DenseTrace:
    recorded = record(tmp_path_factory.mktemp("speed"), beams=(1, 2, 4), num_steps=6).trace
    copies = [
        replace(recorded, prompt_ids=[f"{name}/{copy}" for name in recorded.prompt_ids])
        for copy in range(NUM_COPIES)
    ]
    return merge_traces(copies)


def fastest_positions_per_s(trace, policy) -> float:
    # Processor time, best of several runs: what else the machine does only ever slows it down.
    times = []
    for _ in range(9):
        started = time.process_time()
        replay_positions(trace, policy)
        times.append(time.process_time() - started)
    return trace.num_positions / min(times)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [StaticPolicy.chain(4), StaticPolicy.eagle1()], ids=lambda policy: policy.name
)
def test_static_policies(trace, policy):
    assert fastest_positions_per_s(trace, policy) >= STATIC_POSITIONS_PER_S


@pytest.mark.slow
def test_eagle2(trace):
    policy = Eagle2Policy(limits=TreeLimits(num_steps=5, topk=4, num_draft_tokens=8))
    assert fastest_positions_per_s(trace, policy) >= EAGLE2_POSITIONS_PER_S


@pytest.mark.slow
@pytest.mark.parametrize("calibration", ["identity", "temperature", "isotonic"])
def test_price_policy(trace, costs, calibration):
    point = PricePoint(
        num_steps=6,
        topk=4,
        max_draft_tokens=32,
        size_set="every",
        calibration=calibration,
        price_ratio=1.0,
        stop=True,
        adapt_width=True,
    )
    policy = PointBuilder(trace=trace, costs=costs).build(point, 2e-3).build(costs)
    assert fastest_positions_per_s(trace, policy) >= PRICE_POSITIONS_PER_S
