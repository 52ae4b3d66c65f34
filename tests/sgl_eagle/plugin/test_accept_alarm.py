"""A pinned accept length is warned of once; an ordinary one never."""

import logging

import numpy as np
import pytest
from fake_requests import FakeRequest, make_result, two_level_trees

from sgl_eagle.plugin.accept_alarm import AcceptAlarm, pinned_reason, verified_levels
from sgl_eagle.plugin.observer import StepObserver
from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle_harness.types import NO_NODE

NOTHING, SOME, ALL = [5], [10, 6], [10, 20, 7]
"""Tokens that a pass of a tree with two levels emits."""


@pytest.fixture
def run(caplog):
    """Runs steps of two requests past an alarm; returns the warnings so far."""
    caplog.set_level(logging.WARNING)
    observer = StepObserver(
        clock=RoundClock(),
        runs_ahead=False,
        listeners=(AcceptAlarm(window_passes=10),),
        gauges=lambda _: {},
        export=lambda _: None,
    )

    def run_steps(num_steps, emitted, *, verified=3, over=False):
        requests = [FakeRequest("a"), FakeRequest("b", over=over)]
        for _ in range(num_steps):
            if verified:
                observer.drafted(two_level_trees(2, verified=verified))
            observer.launched(requests, make_result([emitted, emitted]))
            observer.completed([len(emitted) - 1] * 2)
        return [record.getMessage() for record in caplog.records]

    return run_steps


@pytest.mark.parametrize(
    ("correct", "levels", "reason"),
    [
        (0, 200, "pinned at 1.0: the target kept no draft in 100 verify passes"),
        (200, 200, "pinned at its maximum, 3.00: the target kept every draft in 100 verify passes"),
        (1, 200, ""),
        (199, 200, ""),
    ],
)
def test_what_counts_as_pinned(correct, levels, reason):
    found = pinned_reason(num_passes=100, num_correct_drafts=correct, num_verified_levels=levels)
    assert reason in found
    assert bool(reason) == bool(found)


def test_no_draft_kept_is_warned_of_once_the_window_is_full(run):
    assert run(4, NOTHING) == []
    (warning,) = run(1, NOTHING)
    assert "accept length is pinned at 1.0" in warning
    assert "sgl-eagle check" in warning
    assert len(run(20, NOTHING)) == 1


def test_every_draft_kept_is_warned_of(run):
    (warning,) = run(5, ALL)
    assert "pinned at its maximum, 3.00" in warning


def test_the_maximum_is_that_of_the_verified_tree(run):
    # Two nodes verified: the children of the root alone.
    (warning,) = run(5, SOME, verified=2)
    assert "pinned at its maximum, 2.00" in warning


def test_ordinary_texts_raise_no_alarm(run):
    assert run(4, NOTHING) == []
    assert run(1, SOME) == []
    assert run(4, ALL) == []
    assert run(1, SOME) == []


def test_a_second_fault_is_warned_of_again(run):
    assert len(run(5, NOTHING)) == 1
    assert len(run(5, SOME)) == 1
    assert len(run(5, NOTHING)) == 2


def test_plain_steps_and_requests_that_are_over_do_not_count(run):
    assert run(100, NOTHING, verified=0) == []
    assert run(9, NOTHING, over=True) == []
    assert len(run(1, NOTHING, over=True)) == 1


def test_levels_of_trees_of_different_depth():
    drafted = two_level_trees(3, verified=4)
    drafted.columns[1:, 2:] = NO_NODE
    drafted.columns[2] = NO_NODE
    assert verified_levels(drafted).tolist() == [2, 1, 0]
    assert verified_levels(two_level_trees(2, verified=0)).tolist() == [0, 0]
    assert verified_levels(drafted).dtype == np.int64
