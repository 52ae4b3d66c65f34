"""Cached cost tables: found again, and refused where they are another server's."""

import json
import logging
from datetime import UTC, datetime

import pytest
from fake_server import GRID, SETUP, FakeServer, measure

from sgl_eagle.plugin.cost_cache import CostRange, cache_file, read_cached, write_cached
from sgl_eagle_harness.cost_file import CostFile, load_cost_file

WANTED = CostRange(batch_size=16, num_tokens=8, width=4, context_len=512)


@pytest.fixture
def record():
    table, _ = measure(FakeServer(), num_repeats=1, grid=GRID)
    return CostFile.from_table(table, num_repeats=1, created=datetime(2026, 1, 1, tzinfo=UTC))


def test_a_table_is_found_again(record, tmp_path):
    folder = tmp_path / "new"
    assert read_cached(folder, SETUP, WANTED, launches=False) is None
    path = write_cached(folder, record)
    assert [path] == list(folder.iterdir())
    assert read_cached(folder, SETUP, WANTED, launches=False) == record
    assert record.to_table().extends_every_step


def test_another_setup_has_a_file_of_its_own(record, tmp_path):
    write_cached(tmp_path, record)
    other = SETUP.model_copy(update={"num_threads": 8})
    assert cache_file(tmp_path, other) != cache_file(tmp_path, SETUP)
    assert read_cached(tmp_path, other, WANTED, launches=False) is None


def test_a_table_of_another_setup_is_refused_with_what_differs(record, tmp_path, caplog):
    other = SETUP.model_copy(update={"device": "NVIDIA H200"})
    write_cached(tmp_path, record).rename(cache_file(tmp_path, other))
    with caplog.at_level(logging.WARNING):
        assert read_cached(tmp_path, other, WANTED, launches=False) is None
    assert "device: measured on 'cpu', running 'NVIDIA H200'" in caplog.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"batch_size": 32}, "target.batch_size must cover 1 to 32, got 1 to 16"),
        ({"num_tokens": 9}, "target.num_tokens must cover 1 to 9, got 1 to 8"),
        ({"width": 6}, "draft.num_tokens must cover 1 to 6, got 1 to 4"),
        ({"context_len": 1024}, "target.context_len must cover 1 to 1024, got 1 to 512"),
    ],
)
def test_a_table_that_does_not_reach_far_enough_is_refused(
    change, reason, record, tmp_path, caplog
):
    write_cached(tmp_path, record)
    fields = {name: getattr(WANTED, name) for name in WANTED.__slots__}
    with caplog.at_level(logging.WARNING):
        assert read_cached(tmp_path, SETUP, CostRange(**(fields | change)), launches=False) is None
    assert reason in caplog.text


def test_a_table_of_rounds_that_were_timed_alone_is_read_and_not_served(record, tmp_path, caplog):
    path = write_cached(tmp_path, record)
    fields = json.loads(path.read_text())
    assert fields.pop("rounds_in_a_row")
    path.write_text(json.dumps(fields))
    with caplog.at_level(logging.WARNING):
        assert read_cached(tmp_path, SETUP, WANTED, launches=False) is None
    assert "rounds_in_a_row must be true, got false" in caplog.text
    assert not load_cost_file(path).to_table().rounds_in_a_row


def test_a_table_that_does_not_tell_what_the_host_launches_is_not_served_where_it_counts(
    record, tmp_path, caplog
):
    write_cached(tmp_path, record)
    with caplog.at_level(logging.WARNING):
        assert read_cached(tmp_path, SETUP, WANTED, launches=True) is None
    assert "launch must be measured where the host runs ahead of the device" in caplog.text
    table, _ = measure(FakeServer(runs_ahead=True), num_repeats=1, grid=GRID)
    told = CostFile.from_table(table, num_repeats=1, created=record.created)
    write_cached(tmp_path, told)
    assert read_cached(tmp_path, SETUP, WANTED, launches=True) == told


def test_a_damaged_file_and_a_folder_that_cannot_be_written_are_said(record, tmp_path, caplog):
    path = write_cached(tmp_path, record)
    path.write_text(path.read_text()[:100])
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        assert read_cached(tmp_path, SETUP, WANTED, launches=False) is None
        assert write_cached(blocked / "below", record) is None
    assert "is not JSON" in caplog.text
    assert "does not keep its cost table" in caplog.text
