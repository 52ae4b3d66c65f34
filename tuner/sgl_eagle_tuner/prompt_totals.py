"""Sums per prompt, replayed or measured: what speed and accept length are computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sgl_eagle_harness.types import FloatArray, IntArray

US_PER_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTotals:
    """What one setting did on each prompt, replayed or measured.

    Attributes:
        prompt_ids: Q prompts.
        num_tokens: [Q] int64, completion tokens emitted.
        num_verifies: [Q] int64, target passes, plain decoding steps included.
        elapsed_us: [Q] float64, decoding time in microseconds.
    """

    prompt_ids: tuple[str, ...]
    num_tokens: IntArray
    num_verifies: IntArray
    elapsed_us: FloatArray

    @property
    def tok_per_s(self) -> float:
        """Tokens per second over all prompts together."""
        return float(self.num_tokens.sum() / self.elapsed_us.sum() * US_PER_S)

    @property
    def us_per_token(self) -> float:
        """Microseconds per emitted token over all prompts together."""
        return float(self.elapsed_us.sum() / self.num_tokens.sum())

    @property
    def accept_length(self) -> float:
        """Completion tokens per target pass, bonus token included."""
        return float(self.num_tokens.sum() / self.num_verifies.sum())


def join_totals(parts: Sequence[PromptTotals]) -> PromptTotals:
    """Put the prompts of several runs after one another.

    Args:
        parts: At least one.

    Returns:
        All prompts.
    """
    return PromptTotals(
        prompt_ids=tuple(name for part in parts for name in part.prompt_ids),
        num_tokens=np.concatenate([part.num_tokens for part in parts]),
        num_verifies=np.concatenate([part.num_verifies for part in parts]),
        elapsed_us=np.concatenate([part.elapsed_us for part in parts]),
    )
