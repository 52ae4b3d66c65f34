"""Draft trees as arrays: the shapes that policies, replay and engines share.

Letters: B requests (or trace positions), N drafted nodes, M verified nodes, W nodes expanded in one
draft step, K `topk`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_eagle_harness.errors import TreeLimitsError

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]

NO_NODE = -1
"""Marks padding in arrays of node indices, and the root where a parent is asked for."""

MAX_STEPS = 32
MAX_TOPK = 32
MIN_DRAFT_TOKENS = 2
"""The root and one draft."""


def largest_tree_size(*, num_steps: int, topk: int) -> int:
    """Nodes of the largest tree that can be drafted, root included.

    Args:
        num_steps: Draft steps, at least 1.
        topk: Children of every expanded node, and nodes expanded in one step.

    Returns:
        At least 2.
    """
    return 1 + topk + (num_steps - 1) * topk**2


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLimits:
    """Upper limits of one draft tree, in SGLang's terms.

    Attributes:
        num_steps: Draft steps, hence the greatest depth of a node; the root has depth 0.
        topk: Children kept of every expanded node, and nodes expanded in one step at most.
        num_draft_tokens: Tokens verified at most, root included.
    """

    num_steps: int
    topk: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_steps <= MAX_STEPS:
            raise TreeLimitsError(
                f"num_steps must be in [1, {MAX_STEPS}], got num_steps={self.num_steps}"
            )
        if not 1 <= self.topk <= MAX_TOPK:
            raise TreeLimitsError(f"topk must be in [1, {MAX_TOPK}], got topk={self.topk}")
        if not MIN_DRAFT_TOKENS <= self.num_draft_tokens <= self.largest_num_draft_tokens:
            raise TreeLimitsError(
                f"num_draft_tokens must be in [{MIN_DRAFT_TOKENS}, "
                f"{self.largest_num_draft_tokens}] for "
                f"num_steps={self.num_steps}, topk={self.topk} (root + topk + (num_steps - 1) * "
                f"topk^2), got num_draft_tokens={self.num_draft_tokens}"
            )

    @property
    def largest_num_draft_tokens(self) -> int:
        """Nodes that `num_steps` steps of `topk` can draft, root included."""
        return largest_tree_size(num_steps=self.num_steps, topk=self.topk)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchContext:
    """What a decision may know of the running batch besides the drafted trees.

    Attributes:
        batch_size: Requests that are decoded together, for cost; replay sets it freely.
        context_len: [B] int64, tokens before the root of each tree, root excluded.
        num_pending: [B] int64, tokens that the next draft-extend must process (those accepted
            since the draft's cache was last brought up to date), at least 1.
        memo: Results of pure functions of this context, kept by whoever computed them under a key
            of their own.
    """

    batch_size: int
    context_len: IntArray
    num_pending: IntArray
    memo: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        """Rows of every per-request array."""
        return len(self.context_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class Children:
    """What one draft step returns: the best `topk` continuations of every expanded node.

    Attributes:
        tokens: [B, W, K] int64 target-vocabulary ids, most probable first.
        log_probs: [B, W, K] float32 natural-log draft probabilities, at most 0.
        handles: [B, W, K] int64, the drafter's own name for each child, handed back to it when
            the child is expanded.
        valid: [B, W, K] bool, False where the node was padding or the drafter has nothing.
    """

    tokens: IntArray
    log_probs: Float32Array
    handles: IntArray
    valid: BoolArray


@dataclass(slots=True, kw_only=True)
class CandidateTrees:
    """All nodes drafted so far for B requests, in draft order: parents come before children.

    The root is not a row; `parents` is `NO_NODE` for its children. Padding has `valid` False and
    `path_log_confidence` minus infinity. `append` returns a new object; arrays are never mutated.

    Attributes:
        tokens: [B, N] int64.
        parents: [B, N] int64, column of the parent or `NO_NODE`.
        depths: [N] int64, draft step (1-based) that made the column; the same for every row.
        ranks: [N] int64, rank among siblings, 0 is the most probable.
        step_log_probs: [B, N] float32.
        path_log_confidence: [B, N] float32, sum of `step_log_probs` from the root: the log of
            EAGLE-2's node value. Kept as a sum of logs, since products of small probabilities
            underflow.
        handles: [B, N] int64.
        valid: [B, N] bool.
        level_starts: First column of each depth, ascending.
        prefix_memo: Results of pure functions of the first columns, kept by whoever computed them
            under a key of their own. `append` hands them on, since it leaves those columns alone.
    """

    tokens: IntArray
    parents: IntArray
    depths: IntArray
    ranks: IntArray
    step_log_probs: Float32Array
    path_log_confidence: Float32Array
    handles: IntArray
    valid: BoolArray
    level_starts: list[int] = field(default_factory=list)
    prefix_memo: dict[object, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def empty(cls, num_rows: int) -> CandidateTrees:
        """Trees that hold nothing but their roots.

        Args:
            num_rows: B.

        Returns:
            Trees with N = 0.
        """
        ints = np.empty((num_rows, 0), np.int64)
        floats = np.empty((num_rows, 0), np.float32)
        line = np.empty(0, np.int64)
        return cls(
            tokens=ints,
            parents=ints,
            depths=line,
            ranks=line,
            step_log_probs=floats,
            path_log_confidence=floats,
            handles=ints,
            valid=np.empty((num_rows, 0), np.bool_),
        )

    @property
    def num_rows(self) -> int:
        """B."""
        return int(self.tokens.shape[0])

    @property
    def num_nodes(self) -> int:
        """N, padding included."""
        return int(self.tokens.shape[1])

    @property
    def depth(self) -> int:
        """Draft steps so far."""
        return len(self.level_starts)

    @property
    def last_level(self) -> slice:
        """Columns made by the latest draft step."""
        return slice(self.level_starts[-1] if self.level_starts else 0, self.num_nodes)

    def append(self, frontier: IntArray, children: Children) -> CandidateTrees:
        """Add the children of the expanded nodes as one more level.

        Args:
            frontier: [B, W] int64 columns that were expanded; `NO_NODE` is the root when there
                are no nodes yet, else padding (its children must be invalid).
            children: What the drafter returned, [B, W, K].

        Returns:
            Trees with N + W * K columns; `self` is unchanged.
        """
        num_rows, width, topk = children.tokens.shape
        flat = (num_rows, width * topk)
        parents = frontier.repeat(topk, axis=1)
        valid = children.valid.reshape(flat)
        step_log_probs = np.where(valid, children.log_probs.reshape(flat), -np.inf).astype(
            np.float32
        )
        if self.num_nodes:
            rows = np.arange(num_rows)[:, None]
            inherited = self.path_log_confidence[rows, frontier].repeat(topk, axis=1)
            path = np.where(valid, inherited + step_log_probs, -np.inf).astype(np.float32)
        else:
            path = step_log_probs
        new_depths = np.full(width * topk, self.depth + 1)
        return CandidateTrees(
            tokens=np.concatenate([self.tokens, children.tokens.reshape(flat)], axis=1),
            parents=np.concatenate([self.parents, parents], axis=1),
            depths=np.concatenate([self.depths, new_depths]),
            ranks=np.concatenate([self.ranks, np.arange(width * topk) % topk]),
            step_log_probs=np.concatenate([self.step_log_probs, step_log_probs], axis=1),
            path_log_confidence=np.concatenate([self.path_log_confidence, path], axis=1),
            handles=np.concatenate([self.handles, children.handles.reshape(flat)], axis=1),
            valid=np.concatenate([self.valid, valid], axis=1),
            level_starts=[*self.level_starts, self.num_nodes],
            prefix_memo=dict(self.prefix_memo),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """One request's tree as the target verifies it; node 0 is the root.

    Attributes:
        tokens: [M] int64; the root's token is the last token the target committed.
        parents: [M] int64, index of the parent, `NO_NODE` for the root; parents come first.
        depths: [M] int64, 0 for the root.
        path_log_confidence: [M] float32, 0 for the root.
        columns: [M] int64, the node's column in its `CandidateTrees`, `NO_NODE` for the root.
    """

    tokens: IntArray
    parents: IntArray
    depths: IntArray
    path_log_confidence: Float32Array
    columns: IntArray

    @property
    def num_draft_tokens(self) -> int:
        """Nodes verified, root included."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOutcome:
    """What the target made of one tree.

    Attributes:
        path: [num_correct_drafts] int64, accepted nodes of the `DraftTree`, shallow to deep, root
            excluded.
        bonus_token: The one token that the target adds after the accepted path.
    """

    path: IntArray
    bonus_token: int

    @property
    def num_correct_drafts(self) -> int:
        """Drafts the target kept, bonus token excluded."""
        return len(self.path)

    @property
    def num_accept_tokens(self) -> int:
        """Tokens the step emits: correct drafts and the bonus token."""
        return len(self.path) + 1
