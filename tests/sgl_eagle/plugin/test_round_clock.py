"""Stages of rounds add up, and a stage within another is not counted twice."""

import pytest

pytestmark = pytest.mark.reference


class Watch:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def test_a_stage_within_another_takes_its_time_from_it():
    from sgl_eagle.plugin.round_clock import RoundClock

    watch = Watch()
    clock = RoundClock(watch)
    with clock.stage("decide"):
        watch.seconds += 1e-6
        with clock.stage("draft"):
            watch.seconds += 10e-6
        watch.seconds += 100e-6
    watch.seconds += 1  # between stages
    with clock.stage("verify"):
        watch.seconds += 1000e-6
    clock.end_round(3)
    times = clock.take(1)
    assert times is not None
    assert times.stage_us == pytest.approx({"decide": 101, "draft": 10, "verify": 1000})
    assert times.describe() == "batch 3.0, host us a round: decide 101, draft 10, verify 1000"


def test_what_was_taken_is_not_counted_again():
    from sgl_eagle.plugin.round_clock import RoundClock

    watch = Watch()
    clock = RoundClock(watch)
    for _ in range(2):
        assert clock.take(2) is None
        with clock.stage("verify"):
            watch.seconds += 4e-6
        clock.end_round(1)
    times = clock.take(2)
    assert times is not None
    assert (times.round_ct, times.row_ct) == (2, 2)
    assert times.describe() == "batch 1.0, host us a round: verify 4"
    assert clock.take(1) is None


def test_a_stage_that_fails_is_left():
    from sgl_eagle.plugin.round_clock import RoundClock

    watch = Watch()
    clock = RoundClock(watch)
    with pytest.raises(ValueError, match="no"), clock.stage("draft"):
        raise ValueError("no")
    watch.seconds += 1
    with clock.stage("verify"):
        watch.seconds += 2e-6
    clock.end_round(1)
    times = clock.take(1)
    assert times is not None
    assert times.stage_us == pytest.approx({"draft": 0, "verify": 2})
