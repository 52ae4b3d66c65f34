"""Warns when rounds take other times than the cost table says, for as long as is no accident."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

from sgl_eagle.plugin.finished_step import FinishedStep

logger = logging.getLogger(__name__)

LEAST_RATIO, MOST_RATIO = 0.7, 1.4
"""Measured over predicted time of a round that is no cause for a warning."""
REFRESHES_IN_A_ROW = 8
"""That must find the table off, and in the same direction: a thousand rounds, or more later on."""


class PlanLearner(Protocol):
    """What a learning plan knows of its table."""

    @property
    def table_ratio(self) -> float | None:
        """Measured over predicted time of a typical round, of the latest refresh."""
        ...

    @property
    def num_refreshes(self) -> int:
        """Refreshes so far."""
        ...


class TableAlarm:
    """Implements `sgl_eagle.plugin.observer.StepListener`; warns once."""

    def __init__(self, plan: PlanLearner, table: Path | None) -> None:
        """Start with nothing wrong.

        Args:
            plan: Serves, and learns.
            table: Where its cost table is kept; None if nowhere.
        """
        self._plan, self._table = plan, table
        self._num_seen = 0
        self._side, self._num_in_a_row = 0, 0
        self._warned = False

    def observe(self, step: FinishedStep) -> None:
        """Look at what the plan has learnt, if it has since the last step.

        Args:
            step: Any.
        """
        del step
        if self._plan.num_refreshes == self._num_seen or self._warned:
            return
        self._num_seen = self._plan.num_refreshes
        ratio = self._plan.table_ratio
        if ratio is None:
            return
        side = int(ratio > MOST_RATIO) - int(ratio < LEAST_RATIO)
        self._num_in_a_row = self._num_in_a_row + 1 if side == self._side else 1
        self._side = side
        if side and self._num_in_a_row >= REFRESHES_IN_A_ROW:
            self._warned = True
            logger.warning("SGL_EAGLE: %s", describe(ratio, self._table))

    def forget(self, rid: str) -> None:
        """Nothing is kept of a request.

        Args:
            rid: Its name.
        """
        del rid


def describe(ratio: float, table: Path | None) -> str:
    """What is wrong, and what to do.

    Args:
        ratio: Measured over predicted time of a round.
        table: Where the cost table is kept; None if nowhere.

    Returns:
        A sentence.
    """
    when = "now" if ratio > 1 else "when it was measured"
    remedy = "restart the server while nothing else runs"
    if table is not None and table.exists():
        remedy = f"delete {table} and {remedy}"
    return (
        f"rounds take {ratio:.2f} times what the cost table says, and have for a while: choices "
        f"between shapes may be wrong; something else seems to use the device {when}. If it stays "
        f"so, {remedy}, so that costs are measured anew"
    )
