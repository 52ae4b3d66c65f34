"""A server's costs: measured in its turn, kept if they hold, taken from whoever was first."""

import contextlib
import functools
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from fake_rounds import WINDOW, Marks, Worker, make_batches
from fake_server import SETUP

from sgl_eagle_harness.cost_file import load_cost_file
from sgl_eagle_harness.types import TreeLimits

pytestmark = pytest.mark.reference

LIMITS = TreeLimits(num_steps=5, topk=4, num_draft_tokens=16)
SIZES = (1, 8, 16)
ROWS_OF_A_PASS = 2 * 3 * 2
"""Cells: batches, sizes, contexts."""


class OneRank:
    leads = True

    def share_text(self, text):
        return text

    def share_number(self, number):
        return number

    def clock(self, now):
        return now


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Starts a server whose rows of rounds are slower by some factors; returns its costs."""
    from sgl_eagle.plugin import compat_profile, server_costs, server_profile
    from sgl_eagle.plugin.row_clock import RowClock

    monkeypatch.setattr(compat_profile, "make_decode_batches", make_batches)
    monkeypatch.setattr(compat_profile, "forget_decode_batches", lambda _: None)

    def start_server(*, waited=False, **worker):
        marks = Marks(host_runs_ahead=True)
        clock = functools.partial(RowClock, now=lambda: marks.now_us / 1e6)
        monkeypatch.setattr(server_profile, "RowClock", clock)
        for module in (server_costs, server_profile):
            monkeypatch.setattr(module, "marks_of", lambda _: marks)
        turns = []

        @contextlib.contextmanager
        def take_turn(name, *, patience_s):
            turns.append((name, patience_s))
            yield waited() if callable(waited) else waited

        monkeypatch.setattr(server_costs, "measuring_turn", take_turn)
        server = Worker(marks, **worker)
        server.turns = turns
        server.costs = server_costs.measured_costs(
            server,
            LIMITS,
            SIZES,
            SimpleNamespace(cost_cache=tmp_path),
            setup=SETUP,
            ranks=OneRank(),
        )
        return server

    return start_server


def test_costs_are_measured_in_the_grad_mode_that_serves(start):
    server = start()
    # What inference mode allocates, such as room for mail, serving could not write.
    assert server.grad_modes == {(False, False)}
    table = server.costs.to_table()
    assert table.rounds_in_a_row
    assert table.target.us == pytest.approx(np.full((2, 3, 2), 533.0))
    assert float(table.decode_us(1, 1)) == pytest.approx(533 + 32 / WINDOW)
    assert table.launch.us[:, 0] == pytest.approx(np.full((2, 2), 533.0))
    assert table.launch.us[:, 1:] == pytest.approx(np.full((2, 2, 2), 533.0 + 80 + 60))


def test_costs_are_kept_and_the_next_start_takes_no_turn(start, tmp_path):
    first = start()
    ((name, patience_s),) = first.turns
    assert (name, patience_s) == ("cpu", 90.0)
    (path,) = tmp_path.glob("*.json")
    assert load_cost_file(path) == first.costs
    second = start()
    assert second.costs == first.costs
    assert second.turns == second.rows == []


def test_a_server_that_waited_takes_what_one_like_it_has_measured(start, tmp_path):
    first = start()
    (path,) = tmp_path.glob("*.json")
    kept = path.read_text()
    path.unlink()

    def other_measures_meanwhile():
        path.write_text(kept)
        return True

    second = start(waited=other_measures_meanwhile)
    assert second.costs == first.costs
    assert not second.rows
    path.unlink()
    assert start(waited=True).rows  # the other one was of another setup


def test_a_device_that_was_busy_at_first_is_measured_once_more(start, tmp_path, caplog):
    caplog.set_level(logging.INFO, "sgl_eagle")
    # Each cell is warmed up before its first row; repeats and what follows run alone.
    server = start(slowness=lambda row: 2.0 if row <= 2 * ROWS_OF_A_PASS else 1.0)
    assert "once more: rounds took up to 2.00 times as long" in caplog.text
    assert server.costs.to_table().target.us == pytest.approx(np.full((2, 3, 2), 533.0))
    assert list(tmp_path.glob("*.json"))


def test_costs_that_do_not_hold_are_served_and_not_kept(start, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    server = start(slowness=lambda row: 2.0 ** (row // ROWS_OF_A_PASS))
    assert not list(tmp_path.glob("*.json"))
    (record,) = caplog.records
    assert "does not keep: rounds took up to 4.00 times" in record.getMessage()
    assert server.costs.to_table().target.us.min() >= 533.0


def test_one_cell_that_is_off_is_no_reason(start, tmp_path):
    start(slowness=lambda row: 5.0 if row in {3, 30} else 1.0)
    assert list(tmp_path.glob("*.json"))
