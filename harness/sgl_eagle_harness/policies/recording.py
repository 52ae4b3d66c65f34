"""The policy of a dense recording: draft all that any policy of the search space could draft."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_eagle_harness.errors import PolicyConfigError
from sgl_eagle_harness.types import (
    NO_NODE,
    BatchContext,
    BoolArray,
    CandidateTrees,
    IntArray,
    TreeLimits,
)


@dataclass(frozen=True, kw_only=True)
class RecordingPolicy:
    """Expands the union of the frontiers of several beam widths; verifies nothing.

    A beam of width k offers k children of each node and expands the k best of its newest level. A
    wider beam does not contain a narrower one: children of a fifth parent can crowd out those that
    the narrow beam would have expanded. Hence the union.

    Attributes:
        num_steps: Draft steps.
        beams: Beam widths, ascending; the last is the number of children recorded.
    """

    num_steps: int
    beams: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.beams or list(self.beams) != sorted(set(self.beams)) or self.beams[0] < 1:
            raise PolicyConfigError(
                f"beams must be distinct, ascending and at least 1, got {self.beams}"
            )
        if self.num_steps < 1:
            raise PolicyConfigError(f"num_steps must be at least 1, got {self.num_steps}")

    @property
    def name(self) -> str:
        """Short name for logs."""
        return f"recording-{self.num_steps}-{'/'.join(map(str, self.beams))}"

    @property
    def limits(self) -> TreeLimits:
        """Limits of the widest beam; the union may hold more nodes."""
        return TreeLimits(num_steps=self.num_steps, topk=self.beams[-1], num_draft_tokens=2)

    def should_speculate(self, batch: BatchContext) -> BoolArray:  # noqa: D102  SpecPolicy
        return np.ones(batch.num_rows, np.bool_)

    def select_frontier(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:  # noqa: ARG002, D102  SpecPolicy
        wanted = np.zeros(trees.tokens.shape, np.bool_)
        rows = np.arange(trees.num_rows)[:, None]
        for width in self.beams:
            frontier = beam_frontier(trees, width)
            wanted[rows, frontier] |= frontier != NO_NODE
        order = np.argsort(~wanted, axis=1, kind="stable")
        counts = wanted.sum(axis=1)
        frontier = order[:, : int(counts.max(initial=0))]
        return np.where(np.arange(frontier.shape[1]) < counts[:, None], frontier, NO_NODE)

    def select_verify(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:  # noqa: ARG002, D102  SpecPolicy
        return np.empty((trees.num_rows, 0), np.int64)


def beam_frontier(trees: CandidateTrees, width: int) -> IntArray:
    """Nodes of the last level that a beam of one width would expand.

    Args:
        trees: Any trees that contain the beam so far.
        width: Beam width k.

    Returns:
        [B, <= k] int64 columns, best first, `NO_NODE` where there are fewer.
    """
    rows = np.arange(trees.num_rows)[:, None]
    expanded = np.zeros((trees.num_rows, trees.num_nodes + 1), np.bool_)
    expanded[:, NO_NODE] = True  # the last column stands for the root
    frontier = np.empty((trees.num_rows, 0), np.int64)
    for start, end in zip(
        trees.level_starts, [*trees.level_starts[1:], trees.num_nodes], strict=True
    ):
        level = slice(start, end)
        offered = trees.valid[:, level] & (trees.ranks[level] < width)
        offered &= expanded[rows, trees.parents[:, level]]
        scores = np.where(offered, trees.path_log_confidence[:, level], -np.inf)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :width]
        frontier = np.where(np.isneginf(scores[rows, best]), NO_NODE, best + start)
        # Padding writes True to the root's own column, where it is True already.
        expanded[rows, frontier] = True
    return frontier
