"""What policies that learn while they serve are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sgl_eagle_harness.types import Float32Array, FloatArray, IntArray

REFRESH_STEPS = 128
"""Steps between two refreshes: one takes some milliseconds, what lies between only remembers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRows:
    """What one step of B requests yielded, as far as a policy learns from it.

    Attributes:
        batch_size: Requests decoded together.
        elapsed_us: Time since the step before, if both were decode steps in a row; None if not.
        host_bound: Whether the host waited for no device in that time; None if it is not known.
        depths: [B] int64, levels drafted, 0 for plain rows.
        num_draft_tokens: [B] int64, nodes verified, root included.
        num_correct_drafts: [B] int64.
    """

    batch_size: int
    elapsed_us: float | None
    host_bound: bool | None = None
    depths: IntArray
    num_draft_tokens: IntArray
    num_correct_drafts: IntArray


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
