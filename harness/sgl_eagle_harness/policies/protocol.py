"""The one interface between a policy and whatever drafts: an engine, or a recorded trace."""

from __future__ import annotations

from typing import Protocol

from sgl_eagle_harness.types import BatchContext, BoolArray, CandidateTrees, IntArray, TreeLimits


class SpecPolicy(Protocol):
    """Decides every step of speculation for B requests at once, as pure functions of its arguments.

    A policy sees draft scores and costs, never a token that the target sampled in this step: this
    is what keeps sampled output lossless (`harness/README.md`). The engine calls it with as many
    rows as requests run; replay calls it with as many rows as the trace has positions.
    """

    @property
    def name(self) -> str:
        """Short name for logs and reports, e.g. "eagle2-5-4-8"."""
        ...

    @property
    def limits(self) -> TreeLimits | None:
        """Upper limits of any tree the policy builds; None if it never drafts."""
        ...

    def should_speculate(self, batch: BatchContext) -> BoolArray:
        """Whether to draft at all, before anything is drafted.

        Args:
            batch: B rows.

        Returns:
            [B] bool; False decodes plainly.
        """
        ...

    def select_frontier(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:
        """Nodes of the last level to expand in one more draft step.

        Called after each level until it returns only padding or `limits.num_steps` is reached.

        Args:
            trees: All nodes so far; the last level is `trees.last_level`.
            batch: B rows.

        Returns:
            [B, W] int64 columns of `trees`, best first, padded with `NO_NODE`; W may be 0.
        """
        ...

    def select_verify(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:
        """Nodes that the target verifies.

        Args:
            trees: The finished trees.
            batch: B rows.

        Returns:
            [B, M] int64 columns of `trees` in ascending order (so parents come first), padded at
            the end with `NO_NODE`, closed under parents; the root is implied. A row of padding
            alone verifies the root, which is plain decoding.
        """
        ...
