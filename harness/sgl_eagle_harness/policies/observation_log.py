"""What a learning policy was told since it last learnt: kept as it comes, read at a refresh."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_eagle_harness.policies.learning import REFRESH_STEPS, VerifiedRows
from sgl_eagle_harness.shape_estimates import DraftedRows
from sgl_eagle_harness.types import Float32Array, FloatArray, IntArray

ObservedNodes = tuple[IntArray, Float32Array, FloatArray]
"""[M] int64 depths, [M] float32 path log-confidences, and [M] acceptance in [0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """Everything between two refreshes.

    Attributes:
        trees: Drafted trees, each of at least one node.
        steps: Finished steps, at least one.
    """

    trees: tuple[ObservedNodes, ...]
    steps: tuple[VerifiedRows, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all steps, plain ones included."""
        return sum(rows.num_rows for rows in self.steps)

    def nodes(self) -> ObservedNodes:
        """Nodes of all trees.

        Returns:
            Depths, path log-confidences and acceptance, one tree after the other.
        """
        if not self.trees:
            return np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0)
        depths, logs, accepted = zip(*self.trees, strict=True)
        return np.concatenate(depths), np.concatenate(logs), np.concatenate(accepted)

    def drafted_rows(self) -> tuple[DraftedRows, ...]:
        """Rows for which levels were drafted.

        Returns:
            Those of one depth and size together.
        """
        correct: dict[tuple[int, int], list[int]] = {}
        for rows in self.steps:
            for depth, size, kept in rows.groups:
                if depth:
                    correct.setdefault((depth, size), []).extend(kept)
        return tuple(
            DraftedRows(depth, size, len(kept), _reached(kept, depth))
            for (depth, size), kept in correct.items()
        )


def _reached(correct_drafts: list[int], depth: int) -> IntArray:
    counts = np.bincount(correct_drafts, minlength=depth + 1)
    return np.asarray(len(correct_drafts) - counts.cumsum()[:depth])


class ObservationLog:
    """Collects trees and steps until there are enough of them to learn from.

    Adding appends to a list and nothing else, since a server does it in every step.
    """

    __slots__ = ("_refresh_steps", "_steps", "_trees")

    def __init__(self, refresh_steps: int = REFRESH_STEPS) -> None:
        """Start empty.

        Args:
            refresh_steps: Steps between two refreshes at the pace of the first.
        """
        self._refresh_steps = refresh_steps
        self._trees: list[ObservedNodes] = []
        self._steps: list[VerifiedRows] = []

    def add_tree(
        self, depths: IntArray, path_log_confidence: Float32Array, accepted: FloatArray
    ) -> None:
        """Keep the nodes of one tree.

        Args:
            depths: [M] int64, at least 1.
            path_log_confidence: [M] float32, finite.
            accepted: [M] in [0, 1].
        """
        self._trees.append((depths, path_log_confidence, accepted))

    def add_step(self, rows: VerifiedRows, pace: int = 1) -> bool:
        """Keep one finished step.

        Args:
            rows: Its yield and time.
            pace: Times that the steps between two refreshes are waited for.

        Returns:
            Whether a refresh is due.
        """
        self._steps.append(rows)
        return len(self._steps) >= self._refresh_steps * pace

    def take(self) -> Observations:
        """Hand over what was kept, and start anew.

        Returns:
            The trees that have nodes, and all steps.
        """
        trees, self._trees = self._trees, []
        steps, self._steps = self._steps, []
        return Observations(
            trees=tuple(nodes for nodes in trees if len(nodes[0])), steps=tuple(steps)
        )
