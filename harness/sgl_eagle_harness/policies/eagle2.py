"""EAGLE-2/3: expand the topk best nodes of each level, then rerank all nodes to a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.policies.confidence_order import ConfidenceOrder
from sgl_eagle_harness.records import Record
from sgl_eagle_harness.tree_build import (
    at_columns,
    rank_log_scores,
    select_rerank,
    take_best,
)
from sgl_eagle_harness.types import (
    NO_NODE,
    BatchContext,
    BoolArray,
    CandidateTrees,
    IntArray,
    TreeLimits,
)


@dataclass(frozen=True, kw_only=True)
class Eagle2Policy:
    """SGLang's EAGLE with the same num_steps, topk and num_draft_tokens.

    Source: EAGLE-2 (arXiv 2406.16858), section 4: expansion and reranking by the product of draft
    confidences.

    Attributes:
        limits: Depth, branching and verified tokens.
    """

    limits: TreeLimits

    @property
    def name(self) -> str:
        """E.g. "eagle2-5-4-8": num_steps, topk, num_draft_tokens."""
        limits = self.limits
        return f"eagle2-{limits.num_steps}-{limits.topk}-{limits.num_draft_tokens}"

    @property
    def verify_sizes(self) -> tuple[int, ...]:
        """The one size that every tree has."""
        return (self.limits.num_draft_tokens,)

    @property
    def confidence_order(self) -> ConfidenceOrder:
        """Every step expands the topk most confident nodes; reranking goes by confidence too."""
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
        """The topk nodes of the newest level with the highest path confidence.

        Args:
            trees: All nodes so far.
            batch: Ignored.

        Returns:
            [B, topk] int64 columns, best first, `NO_NODE` where a row has fewer.
        """
        del batch
        level = trees.last_level
        valid = trees.valid[:, level]
        keys = rank_log_scores(trees.path_log_confidence[:, level], valid)
        best = take_best(keys, self.limits.topk)
        return np.where(at_columns(valid, best), best + level.start, NO_NODE)

    def select_verify(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:
        """The num_draft_tokens - 1 nodes with the highest path confidence.

        Args:
            trees: The finished trees.
            batch: Ignored.

        Returns:
            [B, M] int64 columns, ascending, padded with `NO_NODE`.
        """
        del batch
        return select_rerank(
            trees.path_log_confidence, trees.valid, self.limits.num_draft_tokens - 1
        )


class Eagle2Spec(Record):
    """Stored form of `Eagle2Policy`.

    Attributes:
        kind: Tag of the record.
        num_steps: Draft steps.
        topk: Children and frontier width.
        num_draft_tokens: Tokens verified, root included.
    """

    kind: Literal["eagle2"] = "eagle2"
    num_steps: int
    topk: int
    num_draft_tokens: int

    def build(self, cost_table: CostTable | None) -> Eagle2Policy:
        """Make the policy.

        Args:
            cost_table: Not needed.

        Returns:
            The policy.

        Raises:
            TreeLimitsError: If no tree satisfies the three numbers.
        """
        del cost_table
        limits = TreeLimits(
            num_steps=self.num_steps, topk=self.topk, num_draft_tokens=self.num_draft_tokens
        )
        return Eagle2Policy(limits=limits)
