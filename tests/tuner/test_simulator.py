from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest

from sgl_eagle_harness.errors import CostTableRangeError, PolicyConfigError
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.policies.plain import PlainPolicy
from sgl_eagle_harness.types import TreeLimits
from sgl_eagle_tuner.replay import replay_positions
from sgl_eagle_tuner.simulator import SimulationConfig, simulate
from sgl_eagle_tuner.walk import walk

POLICY = Eagle2Policy(limits=TreeLimits(num_steps=3, topk=4, num_draft_tokens=9))


@pytest.fixture(scope="module")
def batch_costs(cost_maker):
    return cost_maker(batch_sizes=(1, 2, 4, 8))


def tables(trace, policy):
    return lambda batch_size: replay_positions(trace, policy, batch_size=batch_size)


@pytest.mark.parametrize("policy", [POLICY, PlainPolicy()], ids=lambda policy: policy.name)
def test_single_stream_equals_the_walk(corpus, costs, policy):
    trace = corpus.trace
    run = walk(trace, replay_positions(trace, policy), costs)
    simulation = simulate(trace, tables(trace, policy), costs, SimulationConfig(seed=3))
    assert simulation.elapsed_us == pytest.approx(run.times.total_us.sum())
    assert simulation.counts.emitted.sum() == run.num_accept_tokens.sum()
    assert len(simulation.counts.running) == run.num_steps
    assert sorted(simulation.request_us) == pytest.approx(sorted(run.outcome.totals.elapsed_us))
    assert simulation.saturated_tok_per_s == pytest.approx(run.outcome.totals.tok_per_s)
    ours, theirs = simulation.outcome, run.outcome
    np.testing.assert_allclose(ours.totals.elapsed_us, theirs.totals.elapsed_us)
    np.testing.assert_array_equal(ours.totals.num_tokens, theirs.totals.num_tokens)
    assert ours.accept_rate == theirs.accept_rate
    assert ours.mean_num_steps == theirs.mean_num_steps


@dataclass
class Request:
    row: int
    end: int
    num_pending: int
    admitted_us: float


def simulate_slowly(trace, policy, costs, config, tier):
    # One object per request, one cost look-up per part of a step.
    starts = trace.prompt_starts
    queue = deque()
    for number in range(config.num_passes):
        rng = np.random.default_rng([config.seed, number])
        queue.extend(int(p) for p in rng.permutation(trace.num_prompts))
    running, clock, num_steps, num_switches, finished = [], 0.0, 0, 0, []
    before = None
    while queue or running:
        while queue and len(running) < config.max_running:
            prompt = queue.popleft()
            running.append(Request(int(starts[prompt]) + 1, int(starts[prompt + 1]), 1, clock))
        size = min(s for s in (1, 2, 4, 8) if s >= len(running))
        steps = replay_positions(trace, policy, batch_size=size)
        context = sum(int(trace.context_len[r.row]) for r in running) / len(running)
        speculates = tier(num_steps)
        if speculates:
            pending = max(r.num_pending for r in running)
            clock += float(costs.draft_extend_us(size, pending, context))
            for level in range(steps.widths.shape[1]):
                width = max(int(steps.widths[r.row, level]) for r in running)
                if width:
                    clock += float(costs.draft_step_us(size, width, context))
            num_decisions = max(int(steps.num_decisions[r.row]) for r in running)
            clock += num_decisions * costs.decide_us + costs.verify_select_us
            nodes = max(int(steps.num_draft_tokens[r.row]) for r in running)
            clock += float(costs.verify_us(size, nodes, context))
        else:
            clock += float(costs.decode_us(size, context))
        if before is not None and speculates != before:
            num_switches += 1
            clock += config.switch_us
        before = speculates
        num_steps += 1
        for request in list(running):
            emitted = int(steps.num_accept_tokens[request.row]) if speculates else 1
            request.row += emitted
            request.num_pending = emitted if speculates else request.num_pending + 1
            if request.row >= request.end:
                running.remove(request)
                finished.append(clock - request.admitted_us)
    return clock, num_steps, num_switches, finished


@pytest.mark.parametrize("max_running", [1, 3, 8])
def test_equals_an_obvious_implementation(corpus, batch_costs, max_running):
    trace = corpus.trace
    config = SimulationConfig(max_running=max_running, num_passes=2, seed=5, switch_us=70.0)

    def tier(step):
        return step % 7 < 5

    calls = iter(range(10**6))
    simulation = simulate(
        trace,
        tables(trace, POLICY),
        batch_costs,
        config,
        speculates=lambda _rows, _pending, _size: tier(next(calls)),
    )
    clock, num_steps, num_switches, finished = simulate_slowly(
        trace, POLICY, batch_costs, config, tier
    )
    assert simulation.elapsed_us == pytest.approx(clock)
    assert len(simulation.counts.running) == num_steps
    assert simulation.switch_ct == num_switches
    assert sorted(simulation.request_us) == pytest.approx(sorted(finished))
    assert simulation.counts.emitted.sum() == simulation.request_tokens.sum()
    assert simulation.outcome.totals.elapsed_us.sum() == pytest.approx(clock)


def test_same_seed_same_run_and_another_order_otherwise(corpus, batch_costs):
    trace = corpus.trace
    runs = [
        simulate(
            trace,
            tables(trace, POLICY),
            batch_costs,
            SimulationConfig(max_running=4, seed=seed),
        )
        for seed in (1, 1, 2)
    ]
    assert runs[0].elapsed_us == runs[1].elapsed_us
    np.testing.assert_array_equal(runs[0].request_us, runs[1].request_us)
    assert runs[0].elapsed_us != runs[2].elapsed_us
    assert runs[0].counts.emitted.sum() == runs[2].counts.emitted.sum()


def test_a_size_per_request_never_costs_more_than_padding(corpus, batch_costs):
    trace = corpus.trace

    class Ragged:
        """Verifies a number of nodes that depends on the text."""

        name, limits = "ragged", POLICY.limits
        should_speculate, select_frontier = POLICY.should_speculate, POLICY.select_frontier

        def select_verify(self, trees, batch):
            columns = POLICY.select_verify(trees, batch)
            confident = trees.path_log_confidence[:, 0] > -0.5
            return np.where(confident[:, None], columns, np.where(columns < 1, columns, -1))

    padded, ragged = (
        simulate(
            trace,
            tables(trace, Ragged()),
            batch_costs,
            SimulationConfig(max_running=8, size_per_request=per_request),
        )
        for per_request in (False, True)
    )
    assert ragged.elapsed_us < padded.elapsed_us
    np.testing.assert_array_equal(ragged.counts.emitted, padded.counts.emitted)


def test_batches_beyond_the_cost_table_are_refused(corpus, batch_costs):
    trace = corpus.trace
    with pytest.raises(CostTableRangeError, match="batch_size=9"):
        simulate(
            trace, tables(trace, POLICY), batch_costs, SimulationConfig(max_running=9, num_passes=2)
        )


def test_config_names_what_is_wrong():
    with pytest.raises(PolicyConfigError, match="max_running must be at least 1, got 0"):
        SimulationConfig(max_running=0)
