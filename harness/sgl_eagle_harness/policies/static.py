"""Static trees: one shape for every step, as EAGLE-1 and Medusa draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from pydantic import Field

from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.errors import PolicyConfigError
from sgl_eagle_harness.policies.confidence_order import ConfidenceOrder
from sgl_eagle_harness.records import Record
from sgl_eagle_harness.tree_build import keep_columns
from sgl_eagle_harness.types import (
    NO_NODE,
    BatchContext,
    BoolArray,
    CandidateTrees,
    IntArray,
    TreeLimits,
)

RankPath = tuple[int, ...]
"""A node named by the rank of each step from the root: (0, 2) is the third child of the best."""

EAGLE1_PATHS: tuple[RankPath, ...] = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
"""EAGLE-1's tree (arXiv 2401.15077): 26 nodes with the root, 5 steps."""


def chain_paths(num_steps: int) -> tuple[RankPath, ...]:
    """A chain of the most probable tokens.

    Args:
        num_steps: Its length.

    Returns:
        Rank paths of all its nodes.
    """
    return tuple((0,) * depth for depth in range(1, num_steps + 1))


@dataclass(frozen=True, kw_only=True)
class StaticPolicy:
    """Drafts and verifies the same shape in every step.

    Attributes:
        name: Short name.
        paths: Rank path of every node, root excluded; each path's prefixes must be there too.
        limits: Depth, greatest branching and size of the shape; derived.
    """

    name: str
    paths: tuple[RankPath, ...]
    limits: TreeLimits = field(init=False)
    _frontiers: tuple[IntArray, ...] = field(init=False, repr=False, compare=False)
    _columns: IntArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_paths(self.paths)
        topk = 1 + max(max(path) for path in self.paths)
        num_steps = max(len(path) for path in self.paths)
        limits = TreeLimits(num_steps=num_steps, topk=topk, num_draft_tokens=1 + len(self.paths))
        frontiers, columns = _place_nodes(self.paths, topk, num_steps)
        object.__setattr__(self, "limits", limits)
        object.__setattr__(self, "_frontiers", frontiers)
        object.__setattr__(self, "_columns", columns)

    @classmethod
    def chain(cls, num_steps: int) -> StaticPolicy:
        """A chain of the most probable tokens.

        Args:
            num_steps: Its length, at least 1.

        Returns:
            The policy, named e.g. "chain-4".

        Raises:
            PolicyConfigError: If the length is less than 1.
        """
        if num_steps < 1:
            raise PolicyConfigError(f"num_steps must be at least 1, got {num_steps=}")
        return cls(name=f"chain-{num_steps}", paths=chain_paths(num_steps))

    @classmethod
    def eagle1(cls) -> StaticPolicy:
        """EAGLE-1's tree of 26 nodes.

        Returns:
            The policy.
        """
        return cls(name="eagle1", paths=EAGLE1_PATHS)

    @property
    def verify_sizes(self) -> tuple[int, ...]:
        """The one size that every tree has."""
        return (self.limits.num_draft_tokens,)

    @property
    def confidence_order(self) -> ConfidenceOrder | None:
        """A chain expands its only node; other shapes go by rank, whatever the confidence."""
        if self.limits.topk > 1:
            return None
        return ConfidenceOrder(
            num_certain_steps=self.limits.num_steps - 1,
            num_draft_tokens=self.limits.num_draft_tokens,
        )

    def should_speculate(self, batch: BatchContext) -> BoolArray:
        """Always.

        Args:
            batch: B rows.

        Returns:
            [B] bool, all True.
        """
        return np.ones(batch.num_rows, np.bool_)

    def select_frontier(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:
        """The nodes of the newest level that have children in the shape.

        Args:
            trees: All nodes so far.
            batch: B rows.

        Returns:
            [B, W] int64 columns in draft order, `NO_NODE` where the drafter had nothing.
        """
        del batch
        wanted = self._frontiers[trees.depth - 1]
        return np.where(trees.valid[:, wanted], wanted, NO_NODE)

    def select_verify(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:
        """The nodes of the shape.

        Args:
            trees: The finished trees.
            batch: Ignored.

        Returns:
            [B, M] int64 columns, ascending, padded with `NO_NODE`.
        """
        del batch
        columns = np.broadcast_to(self._columns, (trees.num_rows, len(self._columns)))
        usable = columns < trees.num_nodes
        kept = usable & trees.valid[:, np.minimum(self._columns, trees.num_nodes - 1)]
        return columns if kept.all() else keep_columns(columns, kept)


class StaticSpec(Record):
    """Stored form of `StaticPolicy`.

    Attributes:
        kind: Tag of the record.
        name: Short name.
        paths: Rank path of every node, root excluded.
    """

    kind: Literal["static"] = "static"
    name: str = Field(min_length=1)
    paths: tuple[RankPath, ...]

    def build(self, cost_table: CostTable | None) -> StaticPolicy:
        """Make the policy.

        Args:
            cost_table: Not needed.

        Returns:
            The policy.

        Raises:
            PolicyConfigError: If the paths are not a tree.
        """
        del cost_table
        return StaticPolicy(name=self.name, paths=self.paths)


def _check_paths(paths: Sequence[RankPath]) -> None:
    known = set(paths)
    if not paths:
        raise PolicyConfigError("paths must name at least one node, got none")
    if len(known) != len(paths):
        raise PolicyConfigError(f"paths must be distinct, got {len(paths) - len(known)} repeats")
    for path in paths:
        if not path or min(path) < 0:
            raise PolicyConfigError(f"a path needs at least one rank, all at least 0, got {path}")
        if len(path) > 1 and path[:-1] not in known:
            raise PolicyConfigError(f"paths must hold every node's parent, {path[:-1]} is missing")


def _place_nodes(
    paths: Sequence[RankPath], topk: int, num_steps: int
) -> tuple[tuple[IntArray, ...], IntArray]:
    """Columns of the shape in trees that are drafted with its frontiers.

    Args:
        paths: Checked rank paths.
        topk: Children of every expanded node.
        num_steps: Depth of the shape.

    Returns:
        Columns to expand after each level (the last level has none), and columns of all nodes.
    """
    column: dict[RankPath, int] = {path: path[0] for path in paths if len(path) == 1}
    frontiers: list[IntArray] = []
    start = topk
    for depth in range(1, num_steps):
        expanded = sorted(
            {path[:-1] for path in paths if len(path) == depth + 1}, key=column.__getitem__
        )
        frontiers.append(np.array([column[path] for path in expanded]))
        for index, parent in enumerate(expanded):
            for rank in range(topk):
                column[(*parent, rank)] = start + index * topk + rank
        start += len(expanded) * topk
    frontiers.append(np.empty(0, np.int64))
    return tuple(frontiers), np.array(sorted(column[path] for path in paths))
