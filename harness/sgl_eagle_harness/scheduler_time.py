"""What a running server learns about its scheduler: the host's time between two rounds.

A host that runs ahead launches a round while the device works on the one before. Where the device
is done first, rounds follow each other as fast as the host launches and schedules them, and what is
left of a round without its launch is the scheduler's. Where the host waits for the device, it is at
most that.

Letters: J shapes; G ranges of batch sizes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sgl_eagle_harness.shape_estimates import ROUNDS_COMPARED
from sgl_eagle_harness.types import FloatArray

HALF_LIFE_ROUNDS = 1024.0
"""Rounds after which what was seen counts half. A shape that the scheduler has made slow is given
up and says no more, and a machine may have been busy just then: so it is tried again within a
minute, for as few rounds as it takes to see whether that still holds."""
PRIOR_ROUNDS = 2.0
"""Rounds that what is believed beforehand counts for: few, since only medians are learnt."""


def round_us(
    row_us: npt.ArrayLike, launch_us: npt.ArrayLike, scheduler_us: npt.ArrayLike
) -> FloatArray:
    """Time of rounds of a server: those of the slower of device and host.

    Args:
        row_us: Rounds of a row, with nothing between them; any shape.
        launch_us: The host's own time of launching them, of that shape; `row_us` where host and
            device take turns.
        scheduler_us: The host's time between two rounds; broadcasts against them.

    Returns:
        float64 microseconds of that shape.
    """
    return np.asarray(np.maximum(row_us, np.add(launch_us, scheduler_us)))


class HostRound(NamedTuple):
    """What one round says about the scheduler.

    Attributes:
        batch_size: Requests decoded together.
        shape: Index among the J shapes.
        drafts: Whether that shape drafts.
        rest_us: Time since the round before ended, but for launching a round of this shape.
        host_bound: Whether the host was busy all the time, so that the rest is the scheduler's.
    """

    batch_size: int
    shape: int
    drafts: bool
    rest_us: float
    host_bound: bool


class SchedulerTime:
    """The scheduler's time between two rounds, by range of batch sizes.

    Rounds that draft take it longer, with more tokens of each request, and are told apart. Larger
    batches take it no less, so that a range which was not seen takes over what the next smaller one
    says; what drafts and was not seen, also what plain rounds say.
    """

    def __init__(self, batch_edges: Sequence[int]) -> None:
        """Start at no time.

        Args:
            batch_edges: First batch size of each of the G ranges, ascending from 1.
        """
        self._edges = tuple(batch_edges)
        self._seen_us = np.zeros((2, len(batch_edges)))  # plain rounds, and those that draft
        self._num_rounds = np.zeros((2, len(batch_edges)))

    @property
    def is_nothing(self) -> bool:
        """Whether it is 0 at every batch size, so that no bound can lower it."""
        return not self._seen_us.any()

    def us(self, batch_size: int, *, drafts: bool) -> float:
        """The estimate as it stands.

        Args:
            batch_size: Requests decoded together.
            drafts: Whether the rounds do.

        Returns:
            Microseconds, at least 0.
        """
        plain_us = drafted_us = 0.0
        for place in range(self._range_of(batch_size) + 1):
            plain_us = self._believed(plain_us, (0, place))
            if drafts:
                drafted_us = self._believed(max(plain_us, drafted_us), (1, place))
        return drafted_us if drafts else plain_us

    def _believed(self, beforehand_us: float, cell: tuple[int, int]) -> float:
        num_rounds, seen_us = float(self._num_rounds[cell]), float(self._seen_us[cell])
        if not num_rounds:
            return beforehand_us
        prior_us = min(beforehand_us, seen_us)
        return (PRIOR_ROUNDS * prior_us + num_rounds * seen_us) / (PRIOR_ROUNDS + num_rounds)

    def observe(self, rounds: Sequence[HostRound]) -> None:
        """Learn from rounds.

        Args:
            rounds: All since the last call whose time is known, in order.
        """
        for (place, _), group in groupby(
            rounds, lambda each: (self._range_of(each.batch_size), each.shape)
        ):
            # A round is over when the next one has been launched: the last, when one of another
            # shape may have been.
            *counted, _ = group
            if counted:
                self._learn_from(place, counted)

    def _learn_from(self, place: int, rounds: list[HostRound]) -> None:
        self._num_rounds *= 0.5 ** (len(rounds) / HALF_LIFE_ROUNDS)
        if len(rounds) < ROUNDS_COMPARED:
            return
        # Where the host waited, the scheduler took less: such rounds rank below all others. If half
        # are such, the others are the scheduler's longest, and all that is known is a bound.
        rest_us = sorted(max(0.0, each.rest_us) for each in rounds)
        own_us = sorted(max(0.0, each.rest_us) for each in rounds if each.host_bound)
        rank = (len(rounds) - 1) // 2 - (len(rounds) - len(own_us))
        if rank >= 0:
            cell = int(rounds[0].drafts), place
            self._num_rounds[cell] += len(rounds)
            share = len(rounds) / self._num_rounds[cell]
            self._seen_us[cell] += (own_us[rank] - self._seen_us[cell]) * share
        else:
            # Of smaller batches as well, and of plain rounds, which take no longer.
            bounded = self._seen_us[: 1 + rounds[0].drafts, : place + 1]
            np.minimum(bounded, rest_us[len(rounds) // 2], out=bounded)

    def _range_of(self, batch_size: int) -> int:
        return bisect_right(self._edges, batch_size) - 1
