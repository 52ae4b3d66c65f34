"""One decode step whose outcome has reached the host.

Every step is counted, and few are looked into: what takes time to put together is put together
where somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from sgl_eagle.plugin.compat_requests import emitted_tokens
from sgl_eagle_harness.shared_rows import same_count, same_truth
from sgl_eagle_harness.types import NO_NODE, BoolArray, CandidateTrees, IntArray

STEPS_LOOKED_AT_TOGETHER = 32
"""By those who can wait: the first of a row of steps finds cold caches, the others do not."""


class TreeSizes(NamedTuple):
    """How large one tree is.

    Attributes:
        num_drafted: Nodes drafted, root excluded.
        num_draft_tokens: Nodes verified, root included, padding excluded.
        depth: Levels drafted; 0 is plain decoding.
    """

    num_drafted: int
    num_draft_tokens: int
    depth: int


PLAIN = TreeSizes(num_drafted=0, num_draft_tokens=1, depth=0)


class Drafted(Protocol):
    """What was drafted for a batch of B requests, and what of it was verified."""

    @property
    def common_sizes(self) -> TreeSizes | None:
        """Sizes of all trees, where it takes no look at each to know that they are the same."""
        ...

    @property
    def trees(self) -> CandidateTrees:
        """Drafted nodes of B requests."""
        ...

    @property
    def columns(self) -> IntArray:
        """[B, C] int64 nodes verified, `NO_NODE` where padded; none in a plain row."""
        ...

    @property
    def speculating(self) -> BoolArray:
        """[B] bool, requests that the policy wanted drafts for."""
        ...

    @property
    def num_drafted(self) -> IntArray:
        """[B] int64, nodes drafted, root excluded."""
        ...

    @property
    def num_draft_tokens(self) -> IntArray:
        """[B] int64, nodes verified, root included, padding excluded."""
        ...

    @property
    def depths(self) -> IntArray:
        """[B] int64, levels drafted; 0 is plain decoding."""
        ...

    def row(self, index: int) -> Drafted:
        """What was drafted for one request.

        Args:
            index: Its row.

        Returns:
            One row, which keeps nothing of the others alive.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class DraftedTrees:
    """Trees that are there already. Implements `Drafted`.

    Attributes:
        trees: Drafted nodes of B requests.
        columns: [B, C] int64 nodes verified, `NO_NODE` where padded; none in a plain row.
        speculating: [B] bool, requests that the policy wanted drafts for.
    """

    trees: CandidateTrees
    columns: IntArray
    speculating: BoolArray

    @property
    def common_sizes(self) -> None:
        """Nothing: trees of a policy that decides differ."""
        return

    @cached_property
    def num_drafted(self) -> IntArray:
        """[B] int64, nodes drafted, root excluded."""
        return np.asarray(self.trees.valid.sum(axis=1))

    @cached_property
    def num_draft_tokens(self) -> IntArray:
        """[B] int64, nodes verified, root included, padding excluded."""
        return np.asarray(1 + (self.columns != NO_NODE).sum(axis=1))

    @cached_property
    def depths(self) -> IntArray:
        """[B] int64, levels drafted; 0 is plain decoding."""
        return np.asarray((self.trees.valid * self.trees.depths).max(axis=1, initial=0))

    def row(self, index: int) -> DraftedTrees:
        """What was drafted for one request.

        Args:
            index: Its row.

        Returns:
            One row, which keeps nothing of the others alive.
        """
        trees, rows = self.trees, [index]
        of_rows = ("tokens", "parents", "step_log_probs", "path_log_confidence", "handles", "valid")
        return DraftedTrees(
            trees=replace(
                trees, prefix_memo={}, **{name: getattr(trees, name)[rows] for name in of_rows}
            ),
            columns=self.columns[rows],
            speculating=self.speculating[rows],
        )


Noted = Drafted | Callable[[], Drafted] | None
"""What was drafted, or what says so once the step is over; None where all decoded plainly."""


@dataclass(kw_only=True)
class FinishedStep:
    """One step of B requests.

    Attributes:
        requests: SGLang's requests, whose tokens are those before the step while its result is
            there.
        counted: [B] bool; a request that ended before takes part without effect.
        noted: What was drafted.
        kept: Drafts that the target kept, of each request.
        result: SGLang's `GenerationBatchResult`, on the host; None once `forget_result` was called.
        elapsed_us: Time since the step before, if both were decode steps in a row; None if not.
        host_bound: Whether the host waited for no device in that time; None if it is not known.
    """

    requests: list[Any]
    counted: BoolArray
    noted: Noted
    kept: Sequence[int]
    result: Any
    elapsed_us: float | None
    host_bound: bool | None = None

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.requests)

    @cached_property
    def drafted(self) -> Drafted | None:
        """What was drafted; None where all of them decoded plainly."""
        return self.noted() if callable(self.noted) else self.noted

    @cached_property
    def counted_rows(self) -> slice | IntArray:
        """Indices of the counted rows; a slice where all are, which takes no copy."""
        counted = self.counted
        everyone = counted is same_truth(True, self.batch_size) or counted.all()
        return slice(None) if everyone else np.flatnonzero(counted)

    @cached_property
    def emitted(self) -> IntArray:
        """[B, M] int64 tokens; the first `num_accept_tokens` of a row count."""
        return emitted_tokens(self.result)

    @cached_property
    def num_accept_tokens(self) -> IntArray:
        """[B] int64, bonus token included."""
        return np.array(self.kept, np.int64) + 1

    @cached_property
    def num_correct_drafts(self) -> Sequence[int]:
        """Drafts that the target kept, of each counted row."""
        # Lists: NumPy takes longer to begin than to look at as many rows as a batch has.
        if isinstance(self.counted_rows, slice):
            return self.kept
        return [self.kept[row] for row in self.counted_rows.tolist()]

    def forget_result(self) -> None:
        """Let go of the result, which holds memory of the device, and of its tokens with it."""
        self.result = None

    @property
    def common_sizes(self) -> TreeSizes | None:
        """Sizes of all trees, where it takes no look at each to know that they are the same."""
        return PLAIN if self.drafted is None else self.drafted.common_sizes

    @property
    def speculating(self) -> BoolArray:
        """[B] bool, whether the policy wanted drafts."""
        if self.drafted is None:
            return same_truth(False, self.batch_size)
        return self.drafted.speculating

    @property
    def num_draft_tokens(self) -> IntArray:
        """[B] int64, nodes verified, root included, padding excluded."""
        if self.drafted is None:
            return same_count(1, self.batch_size)
        return self.drafted.num_draft_tokens

    @property
    def num_drafted(self) -> IntArray:
        """[B] int64, nodes drafted, root excluded."""
        if self.drafted is None:
            return same_count(0, self.batch_size)
        return self.drafted.num_drafted

    @property
    def depths(self) -> IntArray:
        """[B] int64, levels drafted; 0 is plain decoding."""
        if self.drafted is None:
            return same_count(0, self.batch_size)
        return self.drafted.depths
