"""A drafter whose scores lean for or against a text, as far as rounding was seen to move them.

A policy decides by scores: which nodes to expand, which to verify, when to stop. Whether its
decision at one step hangs on rounding is tried out here, whatever the policy: every score is moved
by what rounding moves, once so that the text gains and once so that it loses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sgl_eagle_harness.draft_loop import Drafter
from sgl_eagle_harness.types import BoolArray, CandidateTrees, Children, FloatArray, IntArray

EXTRA_CHILDREN = 8
"""Children looked at beyond those asked for, since one of them may move up."""


class LeaningDrafter:
    """Moves the path confidence of every node of one request and ranks siblings anew."""

    def __init__(
        self, drafter: Drafter, text: Sequence[int], moves: FloatArray, *, vocab_size: int
    ) -> None:
        """Lean on a drafter.

        Args:
            drafter: Of one row.
            text: Tokens after the root.
            moves: [S] float64 by depth less one: added to the log path confidence of nodes whose
                path spells the text, taken from that of all others; negative leans against it.
            vocab_size: Tokens that the draft knows.
        """
        self._drafter = drafter
        self._text = text
        self._moves = moves
        self._vocab_size = vocab_size
        self._depth = 0
        self._on_text: BoolArray = np.ones(1, np.bool_)

    def expand_root(self, topk: int) -> Children:
        """Children of the root.

        Args:
            topk: Children to return.

        Returns:
            [1, 1, topk].
        """
        return self._lean(self._drafter.expand_root(self._widened(topk)), self._on_text, topk)

    def expand(self, handles: IntArray, topk: int) -> Children:
        """Children of nodes of the latest level.

        Args:
            handles: [1, W] int64, handles of the nodes; `NO_NODE` is padding.
            topk: Children of each.

        Returns:
            [1, W, topk].
        """
        children = self._drafter.expand(handles, self._widened(topk))
        return self._lean(children, self._on_text[handles[0]], topk)

    def _widened(self, topk: int) -> int:
        return min(topk + EXTRA_CHILDREN, self._vocab_size)

    def _lean(self, children: Children, parents_on_text: BoolArray, topk: int) -> Children:
        inherited = 0.0 if self._depth == 0 else self._moves[self._depth - 1]
        spelled = self._depth < len(self._text)
        on_text = np.zeros(children.tokens.shape, np.bool_)
        if spelled:
            on_text = parents_on_text[:, None] & (children.tokens == self._text[self._depth])
        move = np.where(on_text, 1.0, -1.0) * self._moves[self._depth]
        move = move - np.where(parents_on_text, 1.0, -1.0)[:, None] * inherited
        log_probs = np.minimum(children.log_probs + move, 0.0).astype(np.float32)
        self._depth += 1
        # Handles of the latest level count through its children in the drafter's own order.
        self._on_text = on_text[0].reshape(-1)
        order = np.argsort(-log_probs, axis=-1, kind="stable")[..., :topk]
        return Children(
            tokens=np.take_along_axis(children.tokens, order, axis=-1),
            log_probs=np.take_along_axis(log_probs, order, axis=-1),
            handles=np.take_along_axis(children.handles, order, axis=-1),
            valid=np.take_along_axis(children.valid, order, axis=-1),
        )


def measure_moves(trees: CandidateTrees, others: Sequence[CandidateTrees]) -> FloatArray:
    """How far rounding moves the path confidences of one step.

    Args:
        trees: One row.
        others: The same step drafted otherwise.

    Returns:
        [S] float64, largest change at each depth of the log path confidence of a node that both
        drafted; 0 where there is none.
    """
    scores = _scores_by_path(trees)
    deepest = max(each.depth for each in (trees, *others))
    moves = np.zeros(deepest)
    for other in others:
        for path, score in _scores_by_path(other).items():
            if path in scores:
                depth = len(path) - 1
                moves[depth] = max(moves[depth], abs(score - scores[path]))
    return moves


def _scores_by_path(trees: CandidateTrees) -> dict[tuple[int, ...], float]:
    paths: dict[int, tuple[int, ...]] = {}
    for node in np.flatnonzero(trees.valid[0]).tolist():
        parent = int(trees.parents[0, node])
        paths[node] = (*paths.get(parent, ()), int(trees.tokens[0, node]))
    return {path: float(trees.path_log_confidence[0, node]) for node, path in paths.items()}
