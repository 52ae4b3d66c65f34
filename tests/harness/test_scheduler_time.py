"""The scheduler's time between rounds is learnt where the host is slower, and only there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_eagle_harness.scheduler_time import (
    HALF_LIFE_ROUNDS,
    PRIOR_ROUNDS,
    HostRound,
    SchedulerTime,
    round_us,
)

EDGES = (1, 2, 4, 8)
SMALL, LARGE = 1, 8


def rounds(*rest_us, batch_size=LARGE, shape=0, host_bound=True):
    return [
        HostRound(
            batch_size=batch_size,
            shape=shape,
            drafts=shape > 0,
            rest_us=each,
            host_bound=host_bound,
        )
        for each in rest_us
    ]


def plain_us(found, batch_size):
    return found.us(batch_size, drafts=False)


any_rounds = st.lists(
    st.tuples(
        st.integers(1, 20),
        st.integers(0, 2),
        st.lists(st.floats(-100.0, 1e6), max_size=30),
        st.booleans(),
    ),
    max_size=6,
).map(
    lambda rows: [
        each
        for batch_size, shape, rest_us, host_bound in rows
        for each in rounds(*rest_us, batch_size=batch_size, shape=shape, host_bound=host_bound)
    ]
)


kinds = st.booleans()


@given(seen=st.lists(any_rounds, max_size=4), batch_size=st.integers(1, 30), drafts=kinds)
@settings(max_examples=200, deadline=None)
def test_it_lies_between_nothing_and_the_longest_of_the_hosts_own_times(seen, batch_size, drafts):
    found = SchedulerTime(EDGES)
    for each in seen:
        found.observe(each)
    longest = max((one.rest_us for each in seen for one in each if one.host_bound), default=0.0)
    assert 0.0 <= found.us(batch_size, drafts=drafts) <= max(longest, 0.0) + 1e-6


@given(
    seen=st.lists(any_rounds, max_size=4),
    waited=any_rounds,
    batch_size=st.integers(1, 30),
    drafts=kinds,
)
@settings(max_examples=200, deadline=None)
def test_rounds_in_which_the_host_waited_never_raise_it(seen, waited, batch_size, drafts):
    found = SchedulerTime(EDGES)
    for each in seen:
        found.observe(each)
    before = found.us(batch_size, drafts=drafts)
    found.observe([each._replace(host_bound=False) for each in waited])
    assert found.us(batch_size, drafts=drafts) <= before + 1e-6


def test_rounds_that_draft_take_the_scheduler_longer_and_say_nothing_about_plain_ones():
    found = SchedulerTime(EDGES)
    found.observe(rounds(*[1500.0] * 100, shape=1))
    assert found.us(LARGE, drafts=True) == pytest.approx(1500, rel=0.03)
    assert found.us(LARGE, drafts=False) == 0
    found.observe(rounds(*[400.0] * 100))
    assert found.us(LARGE, drafts=True) == pytest.approx(1500, rel=0.03)
    assert found.us(LARGE, drafts=False) == pytest.approx(400, rel=0.03)


def test_what_plain_rounds_take_it_at_least_others_do():
    found = SchedulerTime(EDGES)
    found.observe(rounds(*[400.0] * 100))
    assert found.us(LARGE, drafts=True) == found.us(LARGE, drafts=False) > 350
    # And where drafted ones leave it less, there is less for plain ones.
    found.observe(rounds(*[300.0] * 100, shape=1, host_bound=False))
    assert found.us(LARGE, drafts=False) <= 300


def test_a_hundred_rounds_tell_nearly_all_of_it():
    found = SchedulerTime(EDGES)
    found.observe(rounds(*[1800.0] * 128))
    assert plain_us(found, LARGE) == pytest.approx(1800, rel=PRIOR_ROUNDS / 100)
    assert plain_us(found, 4) == 0  # the next smaller range, of which nothing is known


def test_a_larger_batch_takes_it_no_less_as_far_as_is_known():
    found = SchedulerTime(EDGES)
    found.observe(rounds(*[500.0] * 1000, batch_size=SMALL))
    assert plain_us(found, LARGE) == pytest.approx(plain_us(found, SMALL))
    found.observe(rounds(*[900.0] * 1000))
    assert plain_us(found, SMALL) == pytest.approx(500, rel=0.01)
    assert plain_us(found, LARGE) == pytest.approx(900, rel=0.01)


def test_a_round_is_over_when_the_next_has_been_launched_which_may_be_of_another_shape():
    found = SchedulerTime(EDGES)
    shapes = ([0] * 10 + [1] * 10) * 50
    rest_us = ([100.0] * 9 + [9000.0]) * 100  # the last of each also launches the other shape
    seen = [
        HostRound(batch_size=LARGE, shape=shape, drafts=False, rest_us=us, host_bound=True)
        for shape, us in zip(shapes, rest_us, strict=True)
    ]
    found.observe(seen)
    assert 90 <= plain_us(found, LARGE) <= 100


@pytest.mark.parametrize("share", [0.02, 0.2])
def test_rare_rounds_in_which_the_host_was_late_say_nothing_about_the_others(share):
    # The host takes 2 ms, now and then ten; the device takes eight.
    rng = np.random.default_rng(0)
    found = SchedulerTime(EDGES)
    found.observe(rounds(*[2000.0] * 128))
    before = plain_us(found, LARGE)
    for _ in range(200):
        late = rng.random(128) < share
        found.observe(
            [
                HostRound(
                    batch_size=LARGE,
                    shape=0,
                    drafts=False,
                    rest_us=10_000.0 if each else 8000.0,
                    host_bound=bool(each),
                )
                for each in late
            ]
        )
    assert plain_us(found, LARGE) <= before + 1e-6


def test_one_late_round_between_others_is_not_the_rule():
    found = SchedulerTime(EDGES)
    for _ in range(100):
        found.observe(rounds(9000.0, 9000.0))
    assert plain_us(found, LARGE) == 0


def test_what_the_host_took_besides_a_shorter_device_is_an_upper_bound():
    found = SchedulerTime(EDGES)
    for batch_size in (SMALL, LARGE):
        found.observe(rounds(*[5000.0] * 500, batch_size=batch_size))
    found.observe(rounds(*[3000.0] * 20, host_bound=False))
    assert plain_us(found, LARGE) <= 3000
    assert plain_us(found, SMALL) <= 3000  # of a smaller batch it is no more


def test_it_wears_off_where_nothing_is_seen_any_more():
    found = SchedulerTime(EDGES)
    found.observe(rounds(*[2000.0] * 128))
    for _ in range(100):
        found.observe(rounds(*[8000.0] * int(HALF_LIFE_ROUNDS / 10), host_bound=False))
    assert plain_us(found, LARGE) < 1000


def test_a_round_takes_what_the_slower_of_device_and_host_does():
    found = round_us([1300.0, 8900.0, 2000.0], [1600.0, 2900.0, 2000.0], 1800.0)
    assert found.tolist() == [3400.0, 8900.0, 3800.0]
