"""Warns when accept length is pinned at 1.0 or at its maximum: a fault, not a workload."""

from __future__ import annotations

import logging

import numpy as np

from sgl_eagle.plugin.finished_step import Drafted, FinishedStep
from sgl_eagle_harness.types import IntArray

logger = logging.getLogger(__name__)

WINDOW_PASSES = 1000
"""Verify passes of drafted trees that are judged together. A sound draft keeps some tokens of so
many and loses some, whatever the text."""


def pinned_reason(
    *, num_passes: int, num_correct_drafts: int, num_verified_levels: int | None
) -> str:
    """Why an accept length looks pinned.

    Args:
        num_passes: Verify passes of drafted trees, at least 1.
        num_correct_drafts: Drafts that the target kept in all of them.
        num_verified_levels: Depths of the verified trees, added up: no more could be kept. None
            where a pass kept nothing of its tree.

    Returns:
        What was seen and what to do; empty where some drafts were kept and some were not.
    """
    if num_correct_drafts == 0:
        return (
            f"accept length is pinned at 1.0: the target kept no draft in {num_passes} verify "
            "passes; the draft is probably made for another target, tokenizer or precision: "
            "see `sgl-eagle check DRAFT --target TARGET`"
        )
    if num_verified_levels is not None and num_correct_drafts == num_verified_levels:
        return (
            f"accept length is pinned at its maximum, {1 + num_verified_levels / num_passes:.2f}: "
            f"the target kept every draft in {num_passes} verify passes; either the texts repeat "
            "themselves, or deeper trees would pay: raise --speculative-num-steps"
        )
    return ""


class AcceptAlarm:
    """Implements `sgl_eagle.plugin.observer.StepListener`.

    Warns once when a window of passes is pinned, and again only after a window that was not.
    """

    def __init__(self, window_passes: int = WINDOW_PASSES) -> None:
        """Start with an empty window.

        Args:
            window_passes: Passes that are judged together.
        """
        self._window_passes = window_passes
        self._warned = False
        self._num_passes = self._num_correct_drafts = self._num_verified_levels = 0
        self._all_were_kept = True

    def observe(self, step: FinishedStep) -> None:
        """Count a step's passes; judge them once they fill a window.

        Args:
            step: Any step; plain passes do not count.
        """
        if step.drafted is None:
            return
        sizes = step.common_sizes
        if sizes is not None and sizes.num_draft_tokens > 1:
            rows, correct = step.counted, step.num_correct_drafts
        else:
            rows = step.counted & (step.num_draft_tokens > 1)
            correct = (step.num_accept_tokens[rows] - 1).tolist()
        self._num_passes += len(correct)
        self._num_correct_drafts += sum(correct)
        self._all_were_kept = self._all_were_kept and 0 not in correct
        if self._all_were_kept:  # else the window is not pinned there, however deep its trees
            self._num_verified_levels += int(verified_levels(step.drafted)[rows].sum())
        if self._num_passes < self._window_passes:
            return
        reason = pinned_reason(
            num_passes=self._num_passes,
            num_correct_drafts=self._num_correct_drafts,
            num_verified_levels=self._num_verified_levels if self._all_were_kept else None,
        )
        if reason and not self._warned:
            logger.warning("SGL_EAGLE: %s", reason)
        self._warned = bool(reason)
        self._num_passes = self._num_correct_drafts = self._num_verified_levels = 0
        self._all_were_kept = True

    def forget(self, rid: str) -> None:
        """Nothing is kept of a request.

        Args:
            rid: Its name.
        """
        del rid


def verified_levels(drafted: Drafted) -> IntArray:
    """Depth of each tree that was verified.

    Args:
        drafted: Trees of B requests.

    Returns:
        [B] int64, 0 where nothing but the root was verified.
    """
    # One more, which NO_NODE, the last index, finds.
    depths = np.append(drafted.trees.depths, 0)
    return np.asarray(depths[drafted.columns].max(axis=1, initial=0))
