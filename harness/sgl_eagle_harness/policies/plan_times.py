"""How long the rounds of a plan take: by the cost table, corrected by what was served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sgl_eagle_harness.policies.learning import VerifiedRows
from sgl_eagle_harness.policies.plan import PlanPolicy
from sgl_eagle_harness.round_shape import RoundShape
from sgl_eagle_harness.scheduler_time import HostRound, SchedulerTime, round_us
from sgl_eagle_harness.shape_estimates import ShapeTimes, TimedRound
from sgl_eagle_harness.types import FloatArray

DEVICE_SHARE = 2.0
"""Times that a round in a row is longer than its launch from which on it says how far the table is
off: a host that is slower than it was at the start cannot be the reason then."""
FEWEST_DEVICE_ROUNDS = 32
"""Rounds that say how far the cost table is off."""

_Sizes = tuple[int, int, int]
"""Batch size, levels drafted, nodes verified."""


class _Modelled(NamedTuple):
    """A round that ran, by the cost table: in a row, and what of it the host launches."""

    shape: int
    row_us: float
    launch_us: float

    @property
    def is_devices(self) -> bool:
        """Whether it is the device by far that makes it as long as it is."""
        return self.row_us >= DEVICE_SHARE * self.launch_us


class _Served(NamedTuple):
    """A round that ran, and took so long."""

    sizes: _Sizes
    modelled: _Modelled
    elapsed_us: float
    host_bound: bool | None


class PlanTimes:
    """Times of the J shapes of a plan, which rounds that were served refine.

    A round is as long as the slower of its device and its host takes, and by how much all else is
    off is learnt by range of batch sizes and shape.
    """

    def __init__(self, plan: PlanPolicy, *, batch_edges: tuple[int, ...]) -> None:
        """Start at the cost table.

        Args:
            plan: Its costs, shapes and contexts count.
            batch_edges: First batch size of each range that shares corrections, ascending from 1.
        """
        self._plan = plan
        self._index = {shape: index for index, shape in enumerate(plan.shapes)}
        self._drafts = np.array([shape.num_steps > 0 for shape in plan.shapes])
        self._scheduler = SchedulerTime(batch_edges)
        self._shapes = ShapeTimes(len(plan.shapes), batch_edges=batch_edges)
        self._device_ratios: list[float] = []

    def shape_us(self, batch_size: int, context_len: float) -> FloatArray:
        """Predicted time of a round of every shape.

        Args:
            batch_size: Requests decoded together.
            context_len: Tokens before the roots.

        Returns:
            [J] float64 microseconds, in the order of the plan's shapes.
        """
        modelled = round_us(
            self._plan.shape_us(batch_size, context_len),
            self._plan.shape_launch_us(batch_size, context_len),
            np.where(
                self._drafts,
                self.scheduler_us(batch_size, drafts=True),
                self.scheduler_us(batch_size, drafts=False),
            ),
        )
        return np.asarray(modelled * self._shapes.ratios(batch_size))

    def scheduler_us(self, batch_size: int, *, drafts: bool) -> float:
        """The scheduler's time between two rounds, as far as it was seen.

        Args:
            batch_size: Requests decoded together.
            drafts: Whether the rounds do.

        Returns:
            Microseconds.
        """
        return self._scheduler.us(batch_size, drafts=drafts)

    def unknown_share(self, batch_size: int) -> FloatArray:
        """How far each shape is known from the table alone.

        Args:
            batch_size: Requests decoded together.

        Returns:
            [J] float64 in (0, 1], 1 for shapes that have not taken turns with another.
        """
        return self._shapes.unknown_share(batch_size)

    def range_of(self, batch_size: int) -> int:
        """The range of batch sizes that one lies in.

        Args:
            batch_size: Requests decoded together, at least 1.

        Returns:
            Its index.
        """
        return self._shapes.range_of(batch_size)

    def observe(self, steps: Sequence[VerifiedRows], context_len: float) -> None:
        """Learn from finished steps.

        Args:
            steps: In order.
            context_len: Tokens before their roots, about.
        """
        known: dict[_Sizes, _Modelled | None] = {}
        served = []
        for rows in steps:
            if rows.elapsed_us is None or not rows.groups:
                continue
            sizes = rows.batch_size, *rows.largest
            if sizes not in known:
                known[sizes] = self._modelled(*sizes, context_len)
            if (modelled := known[sizes]) is not None:
                served.append(_Served(sizes, modelled, rows.elapsed_us, rows.host_bound))
        self._learn_scheduler(served)
        expected_us = {
            sizes: self._expected_us(sizes, modelled)
            for sizes, modelled in known.items()
            if modelled is not None
        }
        self._device_ratios += [
            each.elapsed_us / expected_us[each.sizes]
            for each in served
            if each.host_bound is not None and not each.host_bound and each.modelled.is_devices
        ]
        self._shapes.observe(
            [
                TimedRound(
                    batch_size=each.sizes[0],
                    shape=each.modelled.shape,
                    elapsed_us=each.elapsed_us,
                    expected_us=expected_us[each.sizes],
                )
                for each in served
            ]
        )

    def take_table_ratio(self) -> float | None:
        """How far off the cost table was in the rounds since this was last asked.

        Returns:
            Measured over predicted time of a typical round whose device was by far slower than its
            host; the prediction is the table's, before anything that was learnt. None of fewer than
            `FEWEST_DEVICE_ROUNDS` such rounds.
        """
        ratios, self._device_ratios = self._device_ratios, []
        return float(np.median(ratios)) if len(ratios) >= FEWEST_DEVICE_ROUNDS else None

    def _learn_scheduler(self, served: Sequence[_Served]) -> None:
        if self._scheduler.is_nothing and not any(each.host_bound for each in served):
            return
        # Of a round after which a prefill was launched nothing is known.
        self._scheduler.observe(
            [
                HostRound(
                    batch_size=each.sizes[0],
                    shape=each.modelled.shape,
                    drafts=each.sizes[1] > 0,
                    rest_us=each.elapsed_us - each.modelled.launch_us,
                    host_bound=each.host_bound,
                )
                for each in served
                if each.host_bound is not None
            ]
        )

    def _expected_us(self, sizes: _Sizes, modelled: _Modelled) -> float:
        batch_size, depth, _ = sizes
        scheduler_us = self.scheduler_us(batch_size, drafts=depth > 0)
        return float(round_us(modelled.row_us, modelled.launch_us, scheduler_us))

    def _modelled(
        self, batch_size: int, depth: int, num_nodes: int, context_len: float
    ) -> _Modelled | None:
        # The shape that ran; None of one that is not the plan's. A tree may have fewer nodes than
        # were asked for.
        plan = self._plan
        size = next((size for size in plan.verify_sizes if size >= num_nodes), num_nodes)
        index = self._index.get(RoundShape(depth, size))
        if index is None:
            return None
        row_us = plan.shape_us(batch_size, context_len)
        launch_us = plan.shape_launch_us(batch_size, context_len)
        if not depth:
            # Rounds are compared by their medians: one in a window catches up, and counts as none.
            takes_turns = launch_us is row_us
            row_us = plan.costs.target.at(batch_size, [1], context_len)
            launch_us = row_us if takes_turns else launch_us
        return _Modelled(index, float(row_us[index]), float(launch_us[index]))
