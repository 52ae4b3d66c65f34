"""What a running server learns about shapes of rounds: drafts kept and time taken in each.

Both are ratios to what was expected beforehand. Trees tell of all shapes that they contain, whether
these ran or not; times are known of shapes that did.

Letters: D draft levels at most; S verify sizes; J shapes; T trees; N nodes of the largest tree; G
ranges of batch sizes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from sgl_eagle_harness.calibration import Calibration
from sgl_eagle_harness.decayed_ratio import DecayedRatio
from sgl_eagle_harness.types import BoolArray, Float32Array, FloatArray, IntArray

PRIOR_DRAFTS = 50.0
"""Correct drafts that the prior's average tree counts for before any was seen."""
PRIOR_ROWS = 60.0
"""Verified rows that what trees promise of a depth counts for before any was seen."""
HALF_LIFE_ROUNDS = 4096.0
"""Rounds after which what was observed counts half: about half a minute. Plain rounds age what
trees yielded, too, so that a server which gave up speculation tries again, within minutes."""

PRIOR_ROUNDS = 8.0
"""Rounds that the cost table counts for against those of a shape that took turns with another."""
ROUNDS_COMPARED = 8
"""Rounds of a shape that are held against those of the shape before: later ones say more about the
machine than about the shape."""
MOST_LEARNT = 1.25
"""Factor on what is believed of a shape that one comparison can speak for: a machine that becomes
busy in the middle of one says nothing about shapes."""
SAME_LEVEL = 1.1
"""Factor by which rounds before and after may differ for what ran in between to be held against
them."""
STRANGEST_RATIO = 2.0
"""A round that takes so many times as long as expected, or as short, counts as no stranger."""


class DraftedRows(NamedTuple):
    """Verified rows whose trees are of one size, of any rounds.

    Attributes:
        depth: Levels drafted, at least 1.
        num_draft_tokens: Nodes verified of each, root included.
        num_rows: How many rows.
        reached: [depth] int64, rows of which the target kept at least 1, 2, ... drafts.
    """

    depth: int
    num_draft_tokens: int
    num_rows: int
    reached: IntArray


class DraftYield:
    """Expected correct drafts of every depth and verify size.

    A drafted tree holds every smaller and shallower one, so that it tells of them all. What is
    learnt of a depth is by how much more, or less, it was off than the next shallower one in the
    same trees: so a depth that was not drafted for a while follows what shallower ones tell of
    today's texts. What calibrated trees promise is then held likewise against the drafts that were
    kept, of all rows. A row tells what every shallower tree would have kept, too, but for the nodes
    that a shallower one has room for; by these, too, trees are compared.
    """

    def __init__(self, prior: FloatArray, sizes: Sequence[int]) -> None:
        """Start at the prior.

        Args:
            prior: [D, S] float64 expected correct drafts.
            sizes: [S] verify sizes, root included.
        """
        num_levels, num_sizes = prior.shape
        self._prior = prior
        self._sizes = tuple(sizes)
        self._num_drafts = np.array(sizes) - 1
        self._kept = _ratio((num_levels,), PRIOR_ROWS)
        self._kept_of_prior = _ratio((1,), PRIOR_DRAFTS)
        self._trees = _ratio(prior.shape, PRIOR_DRAFTS)
        self._room = _ratio((num_levels, num_sizes, num_levels), PRIOR_DRAFTS)

    @property
    def ratio(self) -> float:
        """Correct drafts of all verified rows over those that the prior led to expect."""
        return float(self._kept_of_prior.values()[0])

    def age(self, num_rounds: int) -> None:
        """Let what was observed grow older.

        Args:
            num_rounds: Rounds since then, plain ones included.
        """
        for each in (self._kept, self._kept_of_prior, self._trees, self._room):
            each.decay(num_rounds)

    def observe_rows(self, groups: Sequence[DraftedRows]) -> None:
        """Learn from verified rows, after the trees of their rounds.

        Args:
            groups: Rows by depth, of at most D levels, and size.
        """
        promised, room = self._promised_drafts(), self._room.values()
        for depth, size, num_rows, reached in groups:
            column = min(bisect_left(self._sizes, size), len(self._sizes) - 1)
            prior = self._prior[:depth, column]
            # In units of the prior, which a depth of which it promises nothing does not have.
            known = prior > 0
            unit = np.where(known, prior, 1.0)
            kept = known * reached.cumsum() * room[depth - 1, column, :depth] / unit
            expected = known * num_rows * promised[:depth, column] / unit
            _add_levels(self._kept, np.arange(depth), kept, expected)
            total = float(reached.sum()), num_rows * float(prior[-1])
            self._kept_of_prior.add(np.zeros(1, np.int64), *total)

    def observe_trees(
        self, trees: Sequence[tuple[IntArray, Float32Array]], calibration: Calibration
    ) -> None:
        """Learn from drafted trees, verified or not.

        Args:
            trees: T pairs of depths and float32 path log-confidences, in draft order, of all nodes
                down to a depth.
            calibration: From path confidence to acceptance probability.
        """
        if not trees:
            return
        depths, probs = _pad(trees, calibration)
        reach = depths.max(axis=1)
        for deepest in np.unique(reach[reach <= len(self._prior)]).tolist():
            alike = reach == deepest
            self._observe_alike(depths[alike], probs[alike], deepest)

    def expected_drafts(self) -> FloatArray:
        """The estimate as it stands.

        Returns:
            [D, S] float64, rising along both axes, at most as many drafts as levels and nodes.
        """
        depths = np.arange(1, len(self._prior) + 1)[:, None]
        drafts = self._promised_drafts() * _down_the_levels(self._kept)[:, None]
        rising = np.maximum.accumulate(drafts, axis=0)
        most = np.minimum(depths, self._num_drafts)
        return np.asarray(np.minimum(np.maximum.accumulate(rising, axis=1), most))

    def _promised_drafts(self) -> FloatArray:
        # [D, S] by the trees alone.
        return np.asarray(self._prior * _down_the_levels(self._trees))

    def _observe_alike(self, depths: IntArray, probs: FloatArray, deepest: int) -> None:
        # Trees of so many levels, as `_pad` returns them.
        num_levels, num_sizes = self._prior.shape
        levels = range(1, deepest + 1)
        # The best nodes of a tree of each depth, and of those of the deepest the ones so deep.
        alone = [self._sums((depths > 0) & (depths <= level), probs) for level in levels]
        within = [self._sums(depths > 0, probs * (depths <= level)) for level in levels]
        cells = np.arange(deepest * num_sizes).reshape(deepest, num_sizes)
        _add_levels(self._trees, cells, np.stack(alone), len(depths) * self._prior[:deepest])
        cells = (deepest - 1) * num_sizes * num_levels + np.arange(num_sizes * num_levels)
        shallower = cells.reshape(num_sizes, num_levels).T[:deepest]
        self._room.add(shallower.ravel(), np.ravel(alone), np.ravel(within))

    def _sums(self, inside: BoolArray, probs: FloatArray) -> FloatArray:
        # [S] probabilities of the best nodes of those inside, over all trees.
        rank = inside.cumsum(axis=1)[inside]
        by_rank = np.bincount(rank, probs[inside], self._num_drafts[-1] + 1)
        return np.asarray(by_rank.cumsum()[self._num_drafts])


def _ratio(shape: tuple[int, ...], prior: float) -> DecayedRatio:
    return DecayedRatio(shape, prior=prior, half_life=HALF_LIFE_ROUNDS)


def _add_levels(
    ratio: DecayedRatio, cells: IntArray, observed: FloatArray, expected: FloatArray
) -> None:
    # [depth, ...] each: a level is expected to be off as the one above it was.
    above = np.divide(
        observed[:-1], expected[:-1], out=np.ones_like(observed[:-1]), where=expected[:-1] > 0
    )
    first = np.ones_like(observed[:1])
    ratio.add(cells.ravel(), observed.ravel(), (expected * np.concatenate([first, above])).ravel())


def _down_the_levels(ratio: DecayedRatio) -> FloatArray:
    # [D, ...] how far each depth was off, of how much further than the depth above it.
    return np.asarray(ratio.values().cumprod(axis=0))


class TimedRound(NamedTuple):
    """How long one round took.

    Attributes:
        batch_size: Requests decoded together.
        shape: Index among the J shapes.
        elapsed_us: Time since the round before ended.
        expected_us: Time by the cost table, with the scheduler's where that is what it takes.
    """

    batch_size: int
    shape: int
    elapsed_us: float
    expected_us: float


class _Row:
    """Rounds of one shape that follow each other."""

    def __init__(self, place: int, shape: int) -> None:
        self.place, self.shape = place, shape
        self.num_rounds = 0
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=ROUNDS_COMPARED)

    @property
    def is_long(self) -> bool:
        """Whether it has enough rounds to be held against others for itself."""
        return self.num_rounds > ROUNDS_COMPARED

    def add(self, ratios: list[float]) -> None:
        self.num_rounds += len(ratios)
        self._first += ratios[: 1 + ROUNDS_COMPARED - len(self._first)]
        self._last.extend(ratios)

    def first(self) -> list[float]:
        # But one, which also took what the change took.
        return self._first[1:]

    def last(self) -> list[float]:
        return list(self._last)


class ShapeTimes:
    """Measured over expected time of rounds, by range of batch sizes and shape.

    How long rounds take also follows from what else the machine does, and from how far the table as
    a whole is off. So a shape's own factor is learnt only where it takes turns with another: where
    it replaces another for long, from its first rounds against the last ones of the shape before;
    where it ran in between, from those before and after it, if they agree. All else belongs to the
    level of the range, which says nothing about which shape is best.
    """

    def __init__(self, num_shapes: int, *, batch_edges: Sequence[int]) -> None:
        """Start at the cost table.

        Args:
            num_shapes: J.
            batch_edges: First batch size of each of the G ranges, ascending from 1.
        """
        self._edges = tuple(batch_edges)
        shape = (len(batch_edges), num_shapes)
        self._levels = DecayedRatio(shape[:1], prior=PRIOR_ROUNDS, half_life=HALF_LIFE_ROUNDS)
        self._shapes = DecayedRatio(shape, prior=PRIOR_ROUNDS, half_life=HALF_LIFE_ROUNDS)
        self._rows: deque[_Row] = deque(maxlen=3)

    def observe(self, rounds: Sequence[TimedRound]) -> None:
        """Learn from rounds.

        Args:
            rounds: All since the last call whose time is known, in order.
        """
        for (place, shape), group in groupby(
            rounds, lambda each: (self.range_of(each.batch_size), each.shape)
        ):
            ratios = [each.elapsed_us / each.expected_us for each in group]
            self._levels.decay(len(ratios))
            self._shapes.decay(len(ratios))
            row = self._rows[-1] if self._rows else None
            if row is None or (row.place, row.shape) != (place, shape):
                row = self._begin_row(place, shape)
            was_long = row.is_long
            row.add(ratios)
            if row.is_long and not was_long:
                self._learn_from(row)
            own = self._shapes.values()[place, shape]
            levels = np.clip(np.array(ratios) / own, 1 / STRANGEST_RATIO, STRANGEST_RATIO)
            self._levels.add(np.array([place]), float(levels.sum()), len(ratios))

    def ratios(self, batch_size: int) -> FloatArray:
        """Factors on expected times.

        Args:
            batch_size: Requests decoded together.

        Returns:
            [J] float64.
        """
        place = self.range_of(batch_size)
        return np.asarray(self._levels.values()[place] * self._shapes.values()[place])

    def unknown_share(self, batch_size: int) -> FloatArray:
        """How far each shape is known from the table alone.

        Args:
            batch_size: Requests decoded together.

        Returns:
            [J] float64 in (0, 1], 1 for shapes that have not taken turns with another.
        """
        num_rounds = self._shapes.expected[self.range_of(batch_size)]
        return np.asarray(PRIOR_ROUNDS / (PRIOR_ROUNDS + num_rounds))

    def _begin_row(self, place: int, shape: int) -> _Row:
        latest = self._rows[-1] if self._rows else None
        if latest is not None:
            if not latest.is_long:
                self._learn_from(latest)
            if latest.place != place:
                self._rows.clear()
        row = _Row(place, shape)
        self._rows.append(row)
        return row

    def _learn_from(self, row: _Row) -> None:
        # The latest row, once it has as many rounds as are compared, or all it will ever have.
        first, before, _ = (None, None, *self._rows)[-3:]
        if before is None or not row.first():
            return
        if before.is_long:
            if row.is_long:
                self._hold_against(row, row.first(), before, before.last())
        elif first is not None and first.shape == row.shape and before.first():
            levels = float(np.median(first.last())), float(np.median(row.first()))
            if max(levels) <= SAME_LEVEL * min(levels):
                self._hold_against(before, before.first(), row, [*first.last(), *row.first()])

    def _hold_against(
        self, row: _Row, ratios: list[float], other: _Row, other_ratios: list[float]
    ) -> None:
        own = self._shapes.values()[row.place]
        found = own[other.shape] * float(np.median(ratios)) / float(np.median(other_ratios))
        believed = float(own[row.shape])
        clipped = min(max(found, believed / MOST_LEARNT), believed * MOST_LEARNT)
        cell = row.place * len(own) + row.shape
        self._shapes.add(np.array([cell]), len(ratios) * clipped, len(ratios))

    def range_of(self, batch_size: int) -> int:
        """The range of batch sizes that one lies in.

        Args:
            batch_size: Requests decoded together, at least 1.

        Returns:
            Index among the G ranges.
        """
        return bisect_right(self._edges, batch_size) - 1


def _pad(
    trees: Sequence[tuple[IntArray, Float32Array]], calibration: Calibration
) -> tuple[IntArray, FloatArray]:
    # [T, N] depths and probabilities, most confident first; depth 0 is padding, at the end. Nobody
    # knows parents here: where the curve of a depth lies above that of the depth before, a node may
    # come out a little more probable than its parent.
    largest = max(len(depths) for depths, _ in trees)
    depths = np.zeros((len(trees), largest), np.int64)
    logs = np.full((len(trees), largest), -np.inf, np.float32)
    for row, (levels, path_logs) in enumerate(trees):
        depths[row, : len(levels)] = levels
        logs[row, : len(levels)] = path_logs
    order = np.argsort(-logs, axis=1, kind="stable")  # parents before children among equals
    depths = np.take_along_axis(depths, order, axis=1)
    logs = np.take_along_axis(logs, order, axis=1)
    probs = np.zeros(logs.shape)
    for depth in range(1, int(depths.max(initial=0)) + 1):
        at = depths == depth
        probs[at] = calibration.child_accept_probs(
            depth=depth,
            path_log_confidence=logs[at],
            step_log_probs=logs[at],  # online maps go by the path alone
            ranks=np.zeros(int(at.sum()), np.int64),
            parent_probs=np.ones(int(at.sum())),
        )
    return depths, probs
