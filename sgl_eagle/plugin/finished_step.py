"""One decode step whose outcome has reached the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_eagle_harness.types import NO_NODE, BoolArray, CandidateTrees, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedTrees:
    """What was drafted for a batch, and what of it was verified.

    Attributes:
        trees: Drafted nodes of B requests.
        columns: [B, C] int64 nodes verified, `NO_NODE` where padded; none in a plain row.
        speculating: [B] bool, requests that the policy wanted drafts for.
    """

    trees: CandidateTrees
    columns: IntArray
    speculating: BoolArray


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStep:
    """One step of B requests.

    Attributes:
        requests: SGLang's requests, whose tokens are still those before the step.
        counted: [B] bool; a request that ended before takes part without effect.
        drafted: What was drafted; None where all of them decoded plainly.
        emitted: [B, M] int64 tokens; the first `num_accept_tokens` of a row count.
        num_accept_tokens: [B] int64, bonus token included.
        elapsed_us: Time since the step before, if both were decode steps in a row; None if not.
    """

    requests: list[Any]
    counted: BoolArray
    drafted: DraftedTrees | None
    emitted: IntArray
    num_accept_tokens: IntArray
    elapsed_us: float | None

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.requests)

    @property
    def speculating(self) -> BoolArray:
        """[B] bool, whether the policy wanted drafts."""
        if self.drafted is None:
            return np.zeros(self.batch_size, np.bool_)
        return self.drafted.speculating

    @property
    def num_draft_tokens(self) -> IntArray:
        """[B] int64, nodes verified, root included, padding excluded."""
        if self.drafted is None:
            return np.ones(self.batch_size, np.int64)
        return np.asarray(1 + (self.drafted.columns != NO_NODE).sum(axis=1))

    @property
    def num_drafted(self) -> IntArray:
        """[B] int64, nodes drafted, root excluded."""
        if self.drafted is None:
            return np.zeros(self.batch_size, np.int64)
        return np.asarray(self.drafted.trees.valid.sum(axis=1))

    @property
    def depths(self) -> IntArray:
        """[B] int64, levels drafted; 0 is plain decoding."""
        if self.drafted is None:
            return np.zeros(self.batch_size, np.int64)
        trees = self.drafted.trees
        return np.asarray((trees.valid * trees.depths).max(axis=1, initial=0))
