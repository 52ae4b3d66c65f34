"""Rows of rounds on made-up requests: what runs, what counts, and as what."""

import functools

import numpy as np
import pytest
from fake_rounds import WINDOW, Marks, Worker, make_batches

from sgl_eagle_harness.types import BatchContext, TreeLimits

pytestmark = pytest.mark.reference

LIMITS = TreeLimits(num_steps=5, topk=4, num_draft_tokens=16)


@pytest.fixture
def rounds(monkeypatch, request):
    from sgl_eagle.plugin import compat_profile, server_profile

    marks = Marks(host_runs_ahead=request.param)
    monkeypatch.setattr(compat_profile, "make_decode_batches", make_batches)
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
