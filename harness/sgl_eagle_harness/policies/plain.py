"""Plain decoding: the baseline that speculation must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.records import Record
from sgl_eagle_harness.types import BatchContext, BoolArray, CandidateTrees, IntArray, TreeLimits


@dataclass(frozen=True, kw_only=True)
class PlainPolicy:
    """Never drafts: every step verifies the root alone."""

    @property
    def name(self) -> str:
        """Always "plain"."""
        return "plain"

    @property
    def limits(self) -> TreeLimits | None:
        """None: there are no trees."""
        return None

    def should_speculate(self, batch: BatchContext) -> BoolArray:
        """Never.

        Args:
            batch: B rows.

        Returns:
            [B] bool, all False.
        """
        return np.zeros(batch.num_rows, np.bool_)

    def select_frontier(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:
        """Nothing to expand.

        Args:
            trees: Ignored.
            batch: B rows.

        Returns:
            [B, 0] int64.
        """
        del trees
        return np.empty((batch.num_rows, 0), np.int64)

    def select_verify(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:
        """The root alone.

        Args:
            trees: Ignored.
            batch: B rows.

        Returns:
            [B, 0] int64.
        """
        del trees
        return np.empty((batch.num_rows, 0), np.int64)


class PlainSpec(Record):
    """Stored form of `PlainPolicy`.

    Attributes:
        kind: Tag of the record.
    """

    kind: Literal["plain"] = "plain"

    def build(self, cost_table: CostTable | None) -> PlainPolicy:
        """Make the policy.

        Args:
            cost_table: Not needed.

        Returns:
            The policy.
        """
        del cost_table
        return PlainPolicy()
