"""What policies that learn while they serve are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from sgl_eagle_harness.types import Float32Array, FloatArray, IntArray

REFRESH_STEPS = 128
"""Steps between two refreshes at first: one takes some milliseconds, what lies between only
remembers."""
STEPS_TO_SETTLE = 512
"""Steps of which a refresh's share is a quarter: from then on so large a share is waited for."""
SLOWEST_PACE = 4
"""Times that a refresh's steps are waited for at most: estimates forget over thousands of steps, of
which those are an eighth."""


def learning_pace(num_steps: int) -> int:
    """How many times rarer a policy learns than at first: what it knows much of moves little.

    Args:
        num_steps: Steps seen so far, of the kind that is learnt from.

    Returns:
        1 at first, `SLOWEST_PACE` at last.
    """
    return min(max(num_steps // STEPS_TO_SETTLE, 1), SLOWEST_PACE)


class AlikeRows(NamedTuple):
    """Rows of one step whose trees are of one size.

    Attributes:
        depth: Levels drafted, 0 of plain rows.
        num_draft_tokens: Nodes verified of each, root included.
        correct_drafts: Drafts that the target kept, of each row; not to be changed afterwards.
    """

    depth: int
    num_draft_tokens: int
    correct_drafts: Sequence[int]

    @property
    def num_rows(self) -> int:
        """How many rows."""
        return len(self.correct_drafts)

    @property
    def num_correct_drafts(self) -> int:
        """Drafts that the target kept in all of them."""
        return sum(self.correct_drafts)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRows:
    """What one step of B requests yielded, as far as a policy learns from it.

    Attributes:
        batch_size: Requests decoded together.
        elapsed_us: Time since the step before, if both were decode steps in a row; None if not.
        host_bound: Whether the host waited for no device in that time; None if it is not known.
        groups: Its rows, those of one depth and size together.
    """

    batch_size: int
    elapsed_us: float | None
    host_bound: bool | None = None
    groups: tuple[AlikeRows, ...]

    @classmethod
    def of_rows(
        cls,
        *,
        batch_size: int,
        elapsed_us: float | None,
        host_bound: bool | None = None,
        depths: IntArray,
        num_draft_tokens: IntArray,
        num_correct_drafts: IntArray,
    ) -> VerifiedRows:
        """Put rows that may differ into groups.

        Args:
            batch_size: Requests decoded together.
            elapsed_us: Time since the step before, as the attribute.
            host_bound: Whether the host waited for no device in that time, as the attribute.
            depths: [M] int64, levels drafted, 0 for plain rows.
            num_draft_tokens: [M] int64, nodes verified, root included.
            num_correct_drafts: [M] int64.

        Returns:
            The step.
        """
        correct: dict[tuple[int, int], list[int]] = {}
        sizes = zip(depths.tolist(), num_draft_tokens.tolist(), strict=True)
        for key, num_correct in zip(sizes, num_correct_drafts.tolist(), strict=True):
            correct.setdefault(key, []).append(num_correct)
        groups = (AlikeRows(*key, rows) for key, rows in correct.items())
        return cls(
            batch_size=batch_size,
            elapsed_us=elapsed_us,
            host_bound=host_bound,
            groups=tuple(groups),
        )

    @property
    def num_rows(self) -> int:
        """Rows that count."""
        return sum(group.num_rows for group in self.groups)

    @property
    def num_correct_drafts(self) -> int:
        """Drafts that the target kept in all rows."""
        return sum(group.num_correct_drafts for group in self.groups)

    @property
    def largest(self) -> tuple[int, int]:
        """Levels drafted of the deepest row, and nodes verified of the largest; of at least one."""
        if len(self.groups) == 1:
            return self.groups[0][:2]
        depths, sizes, _ = zip(*self.groups, strict=True)
        return max(depths), max(sizes)


@runtime_checkable
class LearningPolicy(Protocol):
    """A policy that is told the outcomes of its steps."""

    def observe_nodes(
        self, depths: IntArray, path_log_confidence: Float32Array, accepted: FloatArray
    ) -> None:
        """Learn from one drafted tree, verified or not.

        Args:
            depths: [M] int64, at least 1, of all its nodes down to a depth, in draft order.
            path_log_confidence: [M] float32, finite.
            accepted: [M] in [0, 1], 1 where the target accepted the whole path.
        """
        ...

    def observe_step(self, rows: VerifiedRows) -> None:
        """Learn from one finished step.

        Args:
            rows: Its yield and time.
        """
        ...
