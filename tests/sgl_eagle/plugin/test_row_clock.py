"""Rounds in a row are timed on the device, and the host waits for it only when all have run."""

import pytest

pytestmark = pytest.mark.reference


class Stream:
    """A device that works on what a host launches, one thing after the other; microseconds."""

    host_runs_ahead = True

    def __init__(self):
        self.host_us = self.device_us = 0.0
        self.waited = False

    def work(self, *, host, device):
        self.host_us += host
        self.device_us = max(self.device_us, self.host_us) + device

    def mark(self):
        self.work(host=0, device=0)
        return self.device_us

    def wait(self):
        self.waited = True

    def us_between(self, start, end):
        assert self.waited, "a mark was read before the row had run"
        return end - start


def run_round(clock, stream, *, host, device):
    with clock.stage("decide"):
        stream.work(host=5, device=0)
        with clock.stage("draft"):
            stream.work(host=host, device=device)
        with clock.stage("verify"):
            stream.work(host=host, device=2 * device)
            with clock.stage("pack"):
                stream.work(host=1, device=3)
        clock.end_round(8)
        assert clock.take(1) is None
        assert not stream.waited


def test_a_host_that_runs_ahead_counts_for_nothing_after_the_first_round():
    from sgl_eagle.plugin.row_clock import RowClock

    stream = Stream()
    clock = RowClock(stream)
    for _ in range(3):
        run_round(clock, stream, host=10, device=100)
    first, *others = clock.rounds_us()
    assert first == pytest.approx({"decide": 5, "draft": 110, "verify": 200, "pack": 3})
    assert others == [pytest.approx({"decide": 0, "draft": 100, "verify": 200, "pack": 3})] * 2


def test_where_the_host_is_slower_the_device_waits_and_that_counts():
    from sgl_eagle.plugin.row_clock import RowClock

    stream = Stream()
    clock = RowClock(stream)
    for _ in range(3):
        run_round(clock, stream, host=100, device=10)
    rounds = clock.rounds_us()
    assert [sum(each.values()) for each in rounds[1:]] == pytest.approx([5 + 2 * 100 + 1] * 2)
    # The host begins a round while the device works on the end of the last, for 22 us; after
    # 105 us it launches the draft's work, for which the device has waited since.
    expected = {"decide": 0, "draft": 105 + 10 - 22, "verify": 100 + 20 - 10, "pack": 3}
    assert rounds[1] == rounds[2] == pytest.approx(expected)


@pytest.mark.parametrize("device_us", [10, 1000])
def test_what_the_host_launches_does_not_depend_on_the_device_nor_on_the_marks(device_us):
    from sgl_eagle.plugin.row_clock import RowClock

    class SlowMarks(Stream):
        def mark(self):
            self.work(host=7, device=0)
            return self.device_us

    stream = SlowMarks()
    clock = RowClock(stream, now=lambda: stream.host_us / 1e6)
    for _ in range(3):
        run_round(clock, stream, host=100, device=device_us)
    expected = {"decide": 5, "draft": 100, "verify": 100, "pack": 1}
    assert clock.launches_us() == [pytest.approx(expected)] * 3


def test_what_follows_the_last_round_belongs_to_none():
    from sgl_eagle.plugin.row_clock import HostMarks, RowClock

    clock = RowClock(HostMarks())
    with clock.stage("decide"):
        clock.end_round(1)
    with clock.stage("watch"):
        pass
    (only,) = clock.rounds_us()
    assert set(only) == {"decide"}
    assert only["decide"] > 0


@pytest.mark.gpu
def test_a_gpu_is_launched_for_in_less_time_than_it_works():
    import torch

    from sgl_eagle.plugin.row_clock import RowClock, marks_of

    clock = RowClock(marks_of("cuda"))
    square = torch.randn(4096, 4096, device="cuda")
    product = torch.empty_like(square)
    torch.mm(square, square, out=product)  # makes handles
    for _ in range(3):
        with clock.stage("decide"):
            for _ in range(20):
                torch.mm(square, square, out=product)
            clock.end_round(1)
    for rounds, launches in zip(clock.rounds_us()[1:], clock.launches_us()[1:], strict=True):
        assert 0 < launches["decide"] < 0.5 * rounds["decide"]
