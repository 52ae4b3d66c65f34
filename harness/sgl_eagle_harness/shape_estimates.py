"""What a running server learns about shapes of rounds: drafts kept and time taken in each.

Both are ratios to what was expected beforehand, and neither needs a shape to have been run: trees
tell of all shapes that they contain, and what is known of some shapes stands for the others.

Letters: D draft levels at most; S verify sizes; J shapes; T trees; N nodes of the largest tree; G
ranges of batch sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sgl_eagle_harness.calibration import Calibration
from sgl_eagle_harness.decayed_ratio import DecayedRatio
from sgl_eagle_harness.types import Float32Array, FloatArray, IntArray

PRIOR_DRAFTS = 50.0
"""Correct drafts that the prior's average tree counts for before any was seen."""
HALF_LIFE_ROUNDS = 4096.0
"""Rounds after which what was observed counts half: about half a minute. Plain rounds age what
trees yielded, too, so that a server which gave up speculation tries again, within minutes."""

PRIOR_ROUNDS = 20.0
"""Rounds that the cost table counts for, in each range of batch sizes and each shape: the mean of
so many is known within some percent."""
STRANGEST_RATIO = 2.0
"""A round that takes so many times as long as expected, or as short, counts as no stranger: it says
something about the machine, not about the shape."""


class DraftYield:
    """Expected correct drafts of every depth and verify size.

    A drafted tree holds every smaller and shallower one, so that it tells of them all. A depth that
    is not drafted takes over how far the next shallower one was off: the prior's average tree says
    how levels continue. What calibrated trees promise is then held against the drafts that were
    kept, of all rows and in the shapes that ran, and all shapes are scaled alike.
    """

    def __init__(self, prior: FloatArray, sizes: Sequence[int]) -> None:
        """Start at the prior.

        Args:
            prior: [D, S] float64 expected correct drafts.
            sizes: [S] verify sizes, root included.
        """
        self._prior = prior
        self._num_drafts = np.array(sizes) - 1
        self._kept = DecayedRatio((1,), prior=PRIOR_DRAFTS, half_life=HALF_LIFE_ROUNDS)
        self._kept_of_prior = DecayedRatio((1,), prior=PRIOR_DRAFTS, half_life=HALF_LIFE_ROUNDS)
        self._trees = DecayedRatio(prior.shape, prior=PRIOR_DRAFTS, half_life=HALF_LIFE_ROUNDS)

    @property
    def ratio(self) -> float:
        """Correct drafts of all verified rows over those that the prior led to expect."""
        return float(self._kept_of_prior.values()[0])

    def age(self, num_rounds: int) -> None:
        """Let what was observed grow older.

        Args:
            num_rounds: Rounds since then, plain ones included.
        """
        self._kept.decay(num_rounds)
        self._kept_of_prior.decay(num_rounds)
        self._trees.decay(num_rounds)

    def observe_rows(self, depths: IntArray, columns: IntArray, num_correct: IntArray) -> None:
        """Learn from verified rows, after the trees of their rounds.

        Args:
            depths: [M] int64 levels drafted, at least 1.
            columns: [M] int64 indices of their verify sizes.
            num_correct: [M] int64 drafts that the target kept.
        """
        place, correct = np.zeros(1, np.int64), float(num_correct.sum())
        promised = self._promised_drafts()
        self._kept.add(place, correct, float(promised[depths - 1, columns].sum()))
        self._kept_of_prior.add(place, correct, float(self._prior[depths - 1, columns].sum()))

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
        for depth in range(1, len(self._prior) + 1):
            whole = reach >= depth
            if not whole.any():
                break
            inside = (depths[whole] <= depth) & (depths[whole] > 0)
            rank = inside.cumsum(axis=1)
            kept = np.where(inside, probs[whole], 0.0)
            sums = [float(kept[rank <= count].sum()) for count in self._num_drafts]
            cells = (depth - 1) * len(sums) + np.arange(len(sums))
            self._trees.add(cells, np.array(sums), whole.sum() * self._prior[depth - 1])

    def expected_drafts(self) -> FloatArray:
        """The estimate as it stands.

        Returns:
            [D, S] float64, rising along both axes, at most as many drafts as levels and nodes.
        """
        depths = np.arange(1, len(self._prior) + 1)[:, None]
        drafts = self._promised_drafts() * float(self._kept.values()[0])
        rising = np.maximum.accumulate(drafts, axis=0)
        most = np.minimum(depths, self._num_drafts)
        return np.asarray(np.minimum(np.maximum.accumulate(rising, axis=1), most))

    def _promised_drafts(self) -> FloatArray:
        # [D, S] by the trees alone.
        ratio = np.ones(self._prior.shape[1])
        rows = []
        for depth, prior in enumerate(self._prior):
            ratio = self._trees.values(towards=ratio)[depth]
            rows.append(prior * ratio)
        return np.stack(rows)


class ShapeTimes:
    """Measured over expected time of rounds, by range of batch sizes and shape.

    A shape that is not run is taken to be off as the others of its range are: a table whose times
    are all too long by a fifth must not speak for what happens to run.
    """

    def __init__(self, num_shapes: int, *, batch_edges: Sequence[int]) -> None:
        """Start at the cost table.

        Args:
            num_shapes: J.
            batch_edges: First batch size of each of the G ranges, ascending from 1.
        """
        self._edges = np.array(batch_edges)
        shape = (len(batch_edges), num_shapes)
        self._ranges = DecayedRatio(shape[:1], prior=PRIOR_ROUNDS, half_life=HALF_LIFE_ROUNDS)
        self._shapes = DecayedRatio(shape, prior=PRIOR_ROUNDS, half_life=HALF_LIFE_ROUNDS)

    def observe(
        self, batch_size: int, shape: int, *, elapsed_us: FloatArray, expected_us: float
    ) -> None:
        """Learn from some rounds of one shape.

        Args:
            batch_size: Requests decoded together.
            shape: Index of the shape.
            elapsed_us: [M] float64, time that each took.
            expected_us: Time that the cost table says of each.
        """
        ratios = np.clip(elapsed_us / expected_us, 1 / STRANGEST_RATIO, STRANGEST_RATIO)
        observed, num_rounds = float(ratios.sum()), len(ratios)
        self._ranges.decay(num_rounds)
        self._shapes.decay(num_rounds)
        place = self.range_of(batch_size)
        self._ranges.add(np.array([place]), observed, num_rounds)
        cell = place * self._shapes.expected.shape[1] + shape
        self._shapes.add(np.array([cell]), observed, num_rounds)

    def ratios(self, batch_size: int) -> FloatArray:
        """Factors on the cost table's times.

        Args:
            batch_size: Requests decoded together.

        Returns:
            [J] float64.
        """
        towards = self._ranges.values()[:, None]
        return np.asarray(self._shapes.values(towards=towards)[self.range_of(batch_size)])

    def unknown_share(self, batch_size: int) -> FloatArray:
        """How far each shape is known from the table and other shapes alone.

        Args:
            batch_size: Requests decoded together.

        Returns:
            [J] float64 in (0, 1], 1 for shapes that have not run.
        """
        num_rounds = self._shapes.expected[self.range_of(batch_size)]
        return np.asarray(PRIOR_ROUNDS / (PRIOR_ROUNDS + num_rounds))

    def range_of(self, batch_size: int) -> int:
        """The range of batch sizes that one lies in.

        Args:
            batch_size: Requests decoded together, at least 1.

        Returns:
            Index among the G ranges.
        """
        return int(np.searchsorted(self._edges, batch_size, side="right")) - 1


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
