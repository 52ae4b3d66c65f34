"""Servers that measure on one device take turns, and nobody waits for ever."""

import errno
import fcntl
import logging
import subprocess
import sys

import pytest

from sgl_eagle.plugin.measuring_turn import device_name, measuring_turn

pytestmark = pytest.mark.reference

HOLDS_THE_LOCK = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that measures on "gpu-0", until it is told to end."""
    lock = tmp_path / "sgl-eagle-measures-gpu-0.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_THE_LOCK, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


class Clock:
    """Passes while somebody sleeps; may end another process by then."""

    def __init__(self, *, ends_after=None, process=None):
        self.seconds, self._ends_after, self._process = 0.0, ends_after, process

    def now(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds
        if self._ends_after is not None and self.seconds >= self._ends_after:
            self._process.kill()  # its lock ends with it
            self._process.wait()


def take_turn(folder, clock, name="gpu-0"):
    return measuring_turn(name, patience_s=30.0, folder=folder, now=clock.now, sleep=clock.sleep)


def test_nobody_waits_where_nobody_measures(tmp_path, caplog):
    caplog.set_level(logging.INFO, "sgl_eagle")
    for _ in range(2):  # the turn ends with the block
        with take_turn(tmp_path, Clock()) as waited:
            assert not waited
    assert not caplog.records


def test_a_turn_comes_when_the_other_process_has_ended(tmp_path, other, caplog):
    caplog.set_level(logging.INFO, "sgl_eagle")
    clock = Clock(ends_after=5.0, process=other)
    with take_turn(tmp_path, clock) as waited:
        assert waited
        assert 5.0 <= clock.seconds < 6.0
    (record,) = caplog.records
    assert "waits for another server that measures its costs on gpu-0" in record.getMessage()


@pytest.mark.usefixtures("other")
def test_whoever_has_waited_for_long_measures_all_the_same(tmp_path, caplog):
    clock = Clock()
    with take_turn(tmp_path, clock) as waited:
        assert waited
        assert 30.0 <= clock.seconds < 31.0
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "another server has measured on gpu-0 for 30 s" in record.getMessage()


@pytest.mark.usefixtures("other")
def test_devices_have_turns_of_their_own(tmp_path):
    with take_turn(tmp_path, Clock(), "gpu-1") as waited:
        assert not waited


def test_a_folder_that_cannot_hold_a_lock_is_said_and_stops_nobody(tmp_path, caplog):
    with take_turn(tmp_path / "none", Clock()) as waited:
        assert not waited
    assert "without a look at other servers" in caplog.text


def test_a_file_system_without_locks_is_said_and_stops_nobody(tmp_path, caplog, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with take_turn(tmp_path, Clock()) as waited:
        assert not waited
    assert "without a look at other servers: [Errno" in caplog.text


def test_a_link_is_not_followed(tmp_path, caplog):
    (tmp_path / "sgl-eagle-measures-gpu-0.lock").symlink_to(tmp_path / "elsewhere")
    with take_turn(tmp_path, Clock()) as waited:
        assert not waited
    assert not (tmp_path / "elsewhere").exists()
    assert "without a look at other servers" in caplog.text


def test_an_error_within_a_turn_ends_it(tmp_path):
    with pytest.raises(ValueError, match="while measuring"), take_turn(tmp_path, Clock()):
        raise ValueError("while measuring")
    with take_turn(tmp_path, Clock()) as waited:
        assert not waited


def test_a_cpu_is_one_device():
    assert device_name("cpu") == "cpu"


@pytest.mark.gpu
def test_a_gpu_has_a_name_that_a_file_can_have(tmp_path):
    name = device_name("cuda")
    assert name == device_name("cuda:0")
    with take_turn(tmp_path, Clock(), name) as waited:
        assert not waited
        (lock,) = tmp_path.iterdir()
    assert name in lock.name
