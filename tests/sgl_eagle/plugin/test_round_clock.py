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
    assert (
        times.describe() == "batch 3.0, host us a round: decide 101, draft 10, verify 1000; own 101"
    )


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
    assert times.describe() == "batch 1.0, host us a round: verify 4; own 0"
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


def test_our_own_time_leaves_out_launches_of_the_models_and_waits():
    from sgl_eagle.plugin.round_clock import RoundClock

    watch = Watch()
    clock = RoundClock(watch)
    for _ in range(2):
        with clock.stage("decide"):
            watch.seconds += 1e-6
            for launched in ("roots", "draft", "wait", "verify", "extend"):
                with clock.stage(launched):
                    watch.seconds += 1000e-6
            with clock.stage("pack"):
                watch.seconds += 20e-6
        with clock.stage("watch"):
            watch.seconds += 300e-6
        clock.end_round(1)
    times = clock.take(2)
    assert times is not None
    assert times.own_us == pytest.approx(2 * 321)
    assert times.describe().endswith("; own 321")


def test_what_an_open_stage_has_counted_so_far_is_taken_with_it():
    from sgl_eagle.plugin.round_clock import RoundClock

    watch = Watch()
    clock = RoundClock(watch)
    with clock.stage("decide"):
        watch.seconds += 3e-6
        clock.end_round(1)
        first = clock.take(1)
        watch.seconds += 4e-6
    clock.end_round(1)
    second = clock.take(1)
    assert first is not None
    assert second is not None
    assert (first.own_us, second.own_us) == (pytest.approx(3), pytest.approx(4))
    assert clock.total_us() == pytest.approx({"decide": 7})
