"""Measures a grid of decode rounds within a time limit, the most needed cells first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from sgl_eagle.plugin.draft_backlog import window_size
from sgl_eagle_harness.cost_table import CostGrid, CostSetup, CostTable
from sgl_eagle_harness.errors import CostTableError
from sgl_eagle_harness.types import FloatArray

logger = logging.getLogger(__name__)

BUDGET_S = 30.0
NUM_REPEATS = 5
"""Of rows of two rounds that count, three: the median leaves one out that something else slowed."""
SECONDS_PER_LOG_LINE = 5.0
MOST_DISAGREEMENT = 1.4
"""Factor between two passes over the same cells from which on something else ran during one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSample:
    """Times of one decode round of B requests, in microseconds.

    Attributes:
        verify_us: Target pass, choice of tokens, and what every round does besides.
        extend_us: Draft-extend over the verified tokens, of a plain round over a window of earlier
            ones; None if the round ran none.
        draft_step_us: One draft step; None if the round ran none.
        launch_us: The host's own time of launching all of it, but for the draft-extend of a plain
            round; None where launching is computing.
    """

    verify_us: float
    extend_us: float | None
    draft_step_us: float | None
    launch_us: float | None


class TimedRounds(Protocol):
    """Runs rounds of one kind: requests, verified tokens a request, cached tokens a request."""

    def warm_up(self, batch_size: int, num_tokens: int, context_len: int) -> None:
        """Run what allocates."""
        ...

    def time_rounds(self, batch_size: int, num_tokens: int, context_len: int) -> list[RoundSample]:
        """Run one row; in one of plain rounds, the draft catches up at least once."""
        ...


@dataclass(frozen=True, kw_only=True)
class ProfileGrid:
    """What to measure.

    Attributes:
        batch_sizes: Ascending from 1; only the ends are needed.
        num_tokens: Verify sizes, ascending from 1; all are needed.
        context_lens: Ascending from 1; only the ends are needed.
        width: Nodes that a draft step expands; steps of fewer take as long.
    """

    batch_sizes: tuple[int, ...]
    num_tokens: tuple[int, ...]
    context_lens: tuple[int, ...]
    width: int

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "num_tokens", "context_lens"):
            points = getattr(self, name)
            if not points or list(points) != sorted(set(points)) or points[0] != 1:
                raise CostTableError(f"{name} must rise from 1, got {list(points)}")

    @property
    def num_cells(self) -> int:
        """Cells of the full grid."""
        return len(self.batch_sizes) * len(self.num_tokens) * len(self.context_lens)


def grid_for(
    *, largest_batch: int, sizes: tuple[int, ...], longest_context: int, width: int
) -> ProfileGrid:
    """A grid that reaches what a server may be asked for.

    Args:
        largest_batch: Requests decoded together at most.
        sizes: Verify sizes, ascending from 1.
        longest_context: Cached tokens of a request at most.
        width: Nodes that a draft step expands.

    Returns:
        Powers of four between 1 and the largest batch, and of eight between 1 and the longest
        context.
    """

    def axis(largest: int, factor: int, first: int) -> tuple[int, ...]:
        points, point = [1], first
        while point * factor <= 2 * largest:  # no point close to the end
            points.append(point)
            point *= factor
        return tuple(sorted({*(p for p in points if p < largest), largest}))

    return ProfileGrid(
        batch_sizes=axis(largest_batch, 4, 4),
        num_tokens=sizes,
        context_lens=axis(longest_context, 8, 256),
        width=width,
    )


@dataclass
class _Samples:
    """Samples of one cell."""

    verify_us: list[float] = field(default_factory=list)
    extend_us: list[float] = field(default_factory=list)
    draft_step_us: list[float] = field(default_factory=list)
    launch_us: list[float] = field(default_factory=list)
    rows_us: list[float] = field(default_factory=list)

    def add(self, row: list[RoundSample]) -> None:
        self.rows_us.append(float(np.median([sample.verify_us for sample in row])))
        for sample in row:
            self.verify_us.append(sample.verify_us)
            if sample.extend_us is not None:
                self.extend_us.append(sample.extend_us)
            if sample.draft_step_us is not None:
                self.draft_step_us.append(sample.draft_step_us)
            if sample.launch_us is not None:
                self.launch_us.append(sample.launch_us)


class GridProfiler:
    """Measures as much of a grid as time allows.

    The ends of the batch and context axes come first, then points between them, then repeats. What
    is measured is always a full grid from end to end, so that nothing is extrapolated.
    """

    def __init__(
        self,
        grid: ProfileGrid,
        rounds: TimedRounds,
        *,
        now: Callable[[], float],
        budget_s: float = BUDGET_S,
        num_repeats: int = NUM_REPEATS,
        agree: Callable[[float], float] = float,
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            grid: What to measure.
            rounds: Runs them.
            now: Seconds on a clock that never goes back.
            budget_s: No row is started after so long.
            num_repeats: Rounds behind each median, if there is time.
            agree: Gives the number that counts, where several measure together.
        """
        self._grid, self._rounds, self._now = grid, rounds, now
        self._budget_s, self._num_repeats, self._agree = budget_s, num_repeats, agree
        self._cells: dict[tuple[int, int, int], _Samples] = {}
        self._started = self._logged = 0.0
        self.num_rounds = 0
        self.disagreement = np.nan

    def measure(self, setup: CostSetup) -> CostTable:
        """Run the rounds; once more if they took other times when they were repeated.

        Args:
            setup: What is measured.

        Returns:
            Medians; the times of decisions are left at 0. `disagreement` then says how far two
            passes over the same cells were apart, as a factor; NaN if nothing ran twice.

        Raises:
            CostTableError: If not even the ends of the axes could be measured in time.
        """
        self._started = self._logged = self._now()
        axes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        for batches, contexts in _growing_axes(self._grid.batch_sizes, self._grid.context_lens):
            if not self._measure_all(batches, contexts):
                break
            axes = (batches, contexts)
        if axes is None:
            raise CostTableError(
                f"the costs of {self._grid.batch_sizes[-1]} requests with "
                f"{self._grid.context_lens[-1]} tokens could not be measured within "
                f"{self._budget_s:.0f} s"
            )
        self._repeat(*axes)
        self.disagreement = self._agree(_disagreement(self._cells.values()))
        if self.is_restless:
            self._measure_once_more(*axes)
        return self._table(setup, *axes)

    @property
    def is_restless(self) -> bool:
        """Whether the times that were measured are those of a device that did something else."""
        return self.disagreement > MOST_DISAGREEMENT

    @property
    def fewest_repeats(self) -> int:
        """Rounds behind the least measured cell."""
        return min(len(cell.verify_us) for cell in self._cells.values())

    def _measure_all(self, batches: tuple[int, ...], contexts: tuple[int, ...]) -> bool:
        # Whether every cell has a sample; the first run of a cell allocates, and does not count.
        for batch in batches:
            for context in contexts:
                for size in self._grid.num_tokens:
                    if (batch, size, context) in self._cells:
                        continue
                    if self._is_late():
                        return False
                    self._rounds.warm_up(batch, size, context)
                    self._run(batch, size, context)
                    if (batch, size, context) not in self._cells:
                        return False
        return True

    def _repeat(self, batches: tuple[int, ...], contexts: tuple[int, ...]) -> None:
        for _ in range(self._num_repeats):  # a row brings one at least
            for size in self._grid.num_tokens:  # outermost: a round after one of its size is usual
                for batch in batches:
                    for context in contexts:
                        cell = self._cells.get((batch, size, context))
                        if cell is None or len(cell.verify_us) < self._num_repeats:
                            self._run(batch, size, context)

    def _measure_once_more(self, batches: tuple[int, ...], contexts: tuple[int, ...]) -> None:
        logger.info(
            "SGL_EAGLE measures its costs once more: rounds took up to %.2f times as long, or as "
            "short, when they were repeated",
            self.disagreement,
        )
        first, self._cells = self._cells, {}
        self._repeat(batches, contexts)
        again = self._agree(_disagreement(self._cells.values()))
        if len(self._cells) < len(first) or np.isnan(again):
            self._cells = first  # there was no time
        else:
            self.disagreement = again

    def _run(self, batch: int, size: int, context: int) -> None:
        if self._is_late():
            return
        samples = self._rounds.time_rounds(batch, size, context)
        self._cells.setdefault((batch, size, context), _Samples()).add(samples)
        self.num_rounds += len(samples)
        now = self._now()
        if now - self._logged >= SECONDS_PER_LOG_LINE:
            self._logged = now
            logger.info(
                "SGL_EAGLE measures its costs: %d of %d cells, %.0f of at most %.0f s",
                *(len(self._cells), self._grid.num_cells, now - self._started, self._budget_s),
            )

    def _is_late(self) -> bool:
        return self._now() - self._started > self._budget_s

    def _table(
        self, setup: CostSetup, batches: tuple[int, ...], contexts: tuple[int, ...]
    ) -> CostTable:
        sizes = self._grid.num_tokens

        def medians(name: str) -> FloatArray:
            return np.array(
                [
                    [
                        [np.median(getattr(self._cells[b, n, c], name)) for c in contexts]
                        for n in sizes
                    ]
                    for b in batches
                ]
            )

        extend_us = medians("extend_us")
        extend_us[:, 0] /= window_size(sizes)  # so many plain rounds share one

        def grid(kind: str, num_tokens: tuple[int, ...], us: FloatArray) -> CostGrid:
            return CostGrid(
                kind=kind,
                batch_size=np.array(batches),
                num_tokens=np.array(num_tokens),
                context_len=np.array(contexts),
                us=us,
            )

        steps = np.array([[self._draft_step_us(b, c) for c in contexts] for b in batches])
        runs_ahead = all(cell.launch_us for cell in self._cells.values())
        widths = (1,) if self._grid.width == 1 else (1, self._grid.width)
        return CostTable(
            setup=setup,
            target=grid("target", sizes, medians("verify_us")),
            draft=grid("draft", widths, np.repeat(steps[:, None], len(widths), axis=1)),
            draft_extend=grid("draft_extend", sizes, extend_us),
            decide_us=0.0,
            verify_select_us=0.0,
            extends_every_step=True,
            drafts_ahead=True,
            rounds_in_a_row=True,
            launch=grid("launch", sizes, medians("launch_us")) if runs_ahead else None,
        )

    def _draft_step_us(self, batch: int, context: int) -> float:
        # A draft step does not depend on how much is verified afterwards.
        samples = [
            us
            for size in self._grid.num_tokens
            for us in self._cells[batch, size, context].draft_step_us
        ]
        if not samples:
            raise CostTableError("no round ran a draft step, so its cost is not known")
        return float(np.median(samples))


def _disagreement(cells: Collection[_Samples]) -> float:
    """How far passes over the same cells are apart: one cell may be off, but not half of them.

    Args:
        cells: Measured in the same order in every pass.

    Returns:
        Largest over smallest of what the passes took for a typical cell; NaN if no pass has reached
        half of the cells again.
    """
    levels = [1.0]
    for index in range(1, max((len(cell.rows_us) for cell in cells), default=0)):
        ratios = [
            cell.rows_us[index] / cell.rows_us[0] for cell in cells if len(cell.rows_us) > index
        ]
        if 2 * len(ratios) >= len(cells):
            levels.append(float(np.median(ratios)))
    return max(levels) / min(levels) if len(levels) > 1 else np.nan


def _growing_axes(
    batches: tuple[int, ...], contexts: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Both axes, from their ends alone to all their points, one point at a time.

    Args:
        batches: Ascending.
        contexts: Ascending.

    Yields:
        Ascending axes, each step a superset of the one before.
    """
    orders = [list(dict.fromkeys((axis[0], axis[-1], *axis))) for axis in (batches, contexts)]
    counts = [min(2, len(order)) for order in orders]
    yield _chosen(orders, counts)
    while counts != [len(order) for order in orders]:
        for index, order in enumerate(orders):
            if counts[index] < len(order):
                counts[index] += 1
                yield _chosen(orders, counts)


def _chosen(orders: list[list[int]], counts: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    batches, contexts = (
        tuple(sorted(order[:count])) for order, count in zip(orders, counts, strict=True)
    )
    return batches, contexts
