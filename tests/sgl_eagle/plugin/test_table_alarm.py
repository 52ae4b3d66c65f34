"""A cost table that is off for long is warned of once, with where it lies."""

import logging
from dataclasses import dataclass

import pytest

from sgl_eagle.plugin.table_alarm import REFRESHES_IN_A_ROW, TableAlarm, describe


@dataclass
class Plan:
    table_ratio: float | None = None
    num_refreshes: int = 0

    def refresh(self, ratio):
        self.table_ratio = ratio
        self.num_refreshes += 1


@pytest.fixture
def run(caplog, tmp_path):
    """Lets a plan find some ratios, one a refresh; returns the warnings so far."""
    caplog.set_level(logging.WARNING)
    plan, table = Plan(), tmp_path / "table.json"
    table.write_text("{}")
    alarm = TableAlarm(plan, table)

    def run_refreshes(*ratios):
        for ratio in ratios:
            plan.refresh(ratio)
            for _ in range(3):  # steps that find nothing new
                alarm.observe(None)
        return [record.getMessage() for record in caplog.records]

    run_refreshes.table = table
    return run_refreshes


@pytest.mark.parametrize(("ratio", "when"), [(0.5, "when it was measured"), (2.0, "now")])
def test_a_table_that_is_off_for_long_is_warned_of_once(run, ratio, when):
    assert run(*[ratio] * (REFRESHES_IN_A_ROW - 1)) == []
    (warning,) = run(ratio)
    assert f"rounds take {ratio:.2f} times what the cost table says" in warning
    assert f"seems to use the device {when}" in warning
    assert f"delete {run.table} and restart the server" in warning
    assert run(*[ratio, 1.0] * REFRESHES_IN_A_ROW) == [warning]


def test_what_passes_is_not_warned_of(run):
    assert run(*[2.0, 2.0, 1.0] * REFRESHES_IN_A_ROW) == []
    assert run(*[2.0, 0.5] * REFRESHES_IN_A_ROW) == []  # in both directions: no table can help


def test_refreshes_that_know_of_too_few_rounds_neither_warn_nor_reassure(run):
    assert run(*[None] * REFRESHES_IN_A_ROW) == []
    assert len(run(*[2.0, None] * REFRESHES_IN_A_ROW)) == 1


def test_tables_that_are_right_are_not_warned_of(run):
    assert run(*[0.8, 1.0, 1.3] * REFRESHES_IN_A_ROW) == []


def test_where_nothing_is_kept_nothing_is_deleted(tmp_path):
    for table in (None, tmp_path / "none.json"):
        assert "delete" not in describe(2.0, table)
        assert "restart the server while nothing else runs" in describe(2.0, table)
