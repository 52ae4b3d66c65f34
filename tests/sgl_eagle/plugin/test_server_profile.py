"""Rows of rounds on made-up requests: what runs, what counts, and as what."""

import contextlib
import functools
from types import SimpleNamespace

import numpy as np
import pytest
from fake_server import SETUP

from sgl_eagle_harness.types import BatchContext, TreeLimits

pytestmark = pytest.mark.reference

LIMITS = TreeLimits(num_steps=5, topk=4, num_draft_tokens=16)
WINDOW = 16
STAGE_US = {"decide": 3.0, "roots": 10.0, "verify": 500.0, "pack": 20.0}


class Marks:
    """A clock that is set by hand, of a device that the host may run ahead of."""

    def __init__(self, *, host_runs_ahead):
        self.host_runs_ahead = host_runs_ahead
        self.now_us = 0.0

    def mark(self):
        return self.now_us

    def wait(self):
        pass

    def us_between(self, start, end):
        return end - start


class Worker:
    """Rounds of known cost; the first of a row takes ten times as long."""

    device = "cpu"

    def __init__(self, marks):
        self.marks = marks
        self.rows = []
        self.grad_modes = set()
        self.server_args = SimpleNamespace(max_running_requests=4)
        model_config = SimpleNamespace(context_len=64)
        self.target_worker = SimpleNamespace(
            model_runner=SimpleNamespace(model_config=model_config)
        )

    @contextlib.contextmanager
    def probing(self, policy, clock, tiers, *, num_unseen):
        self.policy, self.clock, self.num_unseen = policy, clock, num_unseen
        self.drafts = {tier.speculates for tier in tiers.values()} == {True}
        self.rows.append([])
        yield

    def forward_batch_generation(self, batch):
        import torch

        self.grad_modes.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        row, marks = self.rows[-1], self.marks
        row.append((batch.context_len, self.num_unseen))
        scale = 10 if len(row) == 1 else 1
        asked = self.policy.confidence_order.num_certain_steps == 0
        stages = dict(STAGE_US)
        if self.drafts:
            stages |= {"draft": 80.0, "extend": 60.0} | ({"wait": 40.0} if asked else {})
        elif self.num_unseen == WINDOW:
            stages["extend"] = 32.0
            self.num_unseen = 0
        with self.clock.stage("decide"):
            marks.now_us += scale * stages.pop("decide")
            for stage, us in stages.items():
                with self.clock.stage(stage):
                    marks.now_us += scale * us
            self.clock.end_round(len(batch.reqs))
        self.num_unseen += 1


@pytest.fixture
def rounds(monkeypatch, request):
    from sgl_eagle.plugin import compat_profile, server_profile

    def make_batches(worker, num_batches, *, batch_size, context_len):
        del worker
        requests = [SimpleNamespace(rid=str(index)) for index in range(batch_size)]
        return [SimpleNamespace(reqs=requests, context_len=context_len)] * num_batches

    marks = Marks(host_runs_ahead=request.param)
    monkeypatch.setattr(compat_profile, "make_decode_batches", make_batches)
    monkeypatch.setattr(compat_profile, "forget_decode_batches", lambda _: None)
    monkeypatch.setattr(server_profile, "marks_of", lambda _: marks)
    clock = functools.partial(server_profile.RowClock, now=lambda: marks.now_us / 1e6)
    monkeypatch.setattr(server_profile, "RowClock", clock)
    return server_profile.ServerRounds(Worker(marks), LIMITS, window=WINDOW)


@pytest.mark.parametrize("rounds", [True], indirect=True)
def test_all_but_the_first_round_of_a_row_count(rounds):
    samples = rounds.time_rounds(3, 8, 100)
    assert len(rounds._worker.rows[0]) == 3
    assert [sample.verify_us for sample in samples] == [pytest.approx(533)] * 2
    assert [sample.extend_us for sample in samples] == [pytest.approx(60)] * 2
    assert [sample.draft_step_us for sample in samples] == [pytest.approx(80 / 4)] * 2
    assert [sample.launch_us for sample in samples] == [pytest.approx(533 + 80 + 60)] * 2


@pytest.mark.parametrize("rounds", [False], indirect=True)
def test_where_the_host_cannot_run_ahead_one_round_is_a_row(rounds):
    (sample,) = rounds.time_rounds(3, 8, 100)
    assert len(rounds._worker.rows[0]) == 1
    assert sample.verify_us == pytest.approx(5330)
    assert sample.launch_us is None


@pytest.mark.parametrize(("rounds", "num_counted"), [(True, 3), (False, 1)], indirect=["rounds"])
def test_the_last_of_a_row_of_plain_rounds_catches_up(rounds, num_counted):
    samples = rounds.time_rounds(2, 1, 1)
    assert [sample.verify_us for sample in samples] == [pytest.approx(533)] * num_counted
    assert [sample.extend_us for sample in samples[:-1]] == [None] * (num_counted - 1)
    assert samples[-1].extend_us == pytest.approx(32)
    assert {sample.draft_step_us for sample in samples} == {None}
    if num_counted > 1:
        assert [sample.launch_us for sample in samples] == [pytest.approx(533)] * num_counted
    # What the draft has not seen, and the token before it, are cached.
    assert {context_len for context_len, _ in rounds._worker.rows[0]} == {WINDOW + 1}


@pytest.mark.parametrize("rounds", [True, False], indirect=True)
def test_a_warm_up_runs_what_will_be_timed(rounds):
    rounds.warm_up(2, 8, 100)
    rounds.warm_up(2, 1, 100)
    drafting, plain = rounds._worker.rows
    assert drafting == [(100, 0)]
    assert plain == [(100, WINDOW - 1), (100, WINDOW)]


@pytest.mark.parametrize("rounds", [True], indirect=True)
def test_an_exchange_is_what_a_level_takes_longer_where_the_host_waits(rounds):
    assert rounds.exchange_us() == pytest.approx(40 / 4)


@pytest.mark.parametrize("num_tokens", [2, 5, 16])
def test_probes_draft_as_a_plan_does(num_tokens):
    from sgl_eagle.plugin.server_profile import probe_policy
    from sgl_eagle_harness.policies.open_decisions import decides_nothing

    ones = np.ones(3, np.int64)
    batch = BatchContext(batch_size=3, context_len=100 * ones, num_pending=ones)
    probe = probe_policy(LIMITS, num_tokens)
    assert probe.limits == TreeLimits(num_steps=5, topk=4, num_draft_tokens=num_tokens)
    assert decides_nothing(probe)
    assert probe.should_speculate(batch).all()
    assert not probe_policy(LIMITS, 1).should_speculate(batch).any()


@pytest.mark.parametrize("rounds", [True], indirect=True)
def test_costs_are_measured_in_the_grad_mode_that_serves(rounds):
    from sgl_eagle.plugin.server_profile import measured_costs

    worker = rounds._worker
    ranks = SimpleNamespace(leads=True, share_text=lambda _: None, clock=lambda now: now)
    settings = SimpleNamespace(cost_cache=None)
    record = measured_costs(worker, LIMITS, (1, 8, 16), settings, setup=SETUP, ranks=ranks)
    # What inference mode allocates, such as room for mail, serving could not write.
    assert worker.grad_modes == {(False, False)}
    table = record.to_table()
    assert table.rounds_in_a_row
    assert table.target.us == pytest.approx(np.full((2, 3, 2), 533.0))
    assert float(table.decode_us(1, 1)) == pytest.approx(533 + 32 / WINDOW)
    assert table.launch.us[:, 0] == pytest.approx(np.full((2, 2), 533.0))
    assert table.launch.us[:, 1:] == pytest.approx(np.full((2, 2, 2), 533.0 + 80 + 60))
