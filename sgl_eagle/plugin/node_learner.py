"""Hands the outcomes of drafted nodes to a policy that learns while it serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_eagle.plugin.compat_requests import completion_length, completion_tokens
from sgl_eagle.plugin.finished_step import FinishedStep
from sgl_eagle_harness.node_outcome import spell_path
from sgl_eagle_harness.policies.learning import LearningPolicy, VerifiedRows
from sgl_eagle_harness.types import CandidateTrees, Float32Array, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class _WaitingTree:
    """A drafted tree whose text is still to come; `start` is its root's first child in the text."""

    request: Any
    start: int
    tokens: IntArray
    parents: IntArray
    depths: IntArray
    path_log_confidence: Float32Array

    @property
    def reach(self) -> int:
        return int(self.depths[-1])  # levels come one after the other


class NodeLearner:
    """Follows one tree of each step until the text has caught up with it.

    One, in turn, whatever the batch: what learning costs does not grow with the load, and every
    request has its turn.
    """

    def __init__(self, policy: LearningPolicy) -> None:
        """Start with nothing observed.

        Args:
            policy: Learns.
        """
        self._policy = policy
        self._turn = 0
        self._waiting: dict[str, list[_WaitingTree]] = {}

    def observe(self, step: FinishedStep) -> None:
        """Learn from one step.

        Args:
            step: Its tokens have not been added to the requests yet.
        """
        rows = np.flatnonzero(step.counted)
        if step.drafted is not None and len(rows):
            self._turn += 1
            row = int(rows[self._turn % len(rows)])
            self._follow(step.requests[row], step.drafted.trees, row)
        for row in rows.tolist():
            rid = step.requests[row].rid
            if rid in self._waiting:
                self._settle(rid, step.emitted[row, : step.num_accept_tokens[row]])
        self._policy.observe_step(
            VerifiedRows(
                batch_size=step.batch_size,
                elapsed_us=step.elapsed_us,
                depths=step.depths[rows],
                num_draft_tokens=step.num_draft_tokens[rows],
                num_correct_drafts=step.num_accept_tokens[rows] - 1,
            )
        )

    def forget(self, rid: str) -> None:
        """Learn what can be learnt from a request that has ended.

        Args:
            rid: Its name; its tokens are complete.
        """
        for tree in self._waiting.pop(rid, ()):
            self._learn(tree, completion_tokens(tree.request, tree.start))

    def _follow(self, request: Any, trees: CandidateTrees, row: int) -> None:
        nodes = np.flatnonzero(trees.valid[row])
        if not len(nodes):
            return
        new_index = np.full(trees.num_nodes + 1, -1)
        new_index[nodes] = np.arange(len(nodes))
        tree = _WaitingTree(
            request=request,
            start=completion_length(request),
            tokens=trees.tokens[row, nodes],
            parents=new_index[trees.parents[row, nodes]],
            depths=trees.depths[nodes],
            path_log_confidence=trees.path_log_confidence[row, nodes],
        )
        self._waiting.setdefault(request.rid, []).append(tree)

    def _settle(self, rid: str, newest: IntArray) -> None:
        # Learns from the trees of a request that its text reaches with the newest tokens.
        still_waiting = []
        for tree in self._waiting.pop(rid):
            if completion_length(tree.request) - tree.start + len(newest) < tree.reach:
                still_waiting.append(tree)
                continue
            text = np.concatenate([completion_tokens(tree.request, tree.start), newest])
            self._learn(tree, text)
        if still_waiting:
            self._waiting[rid] = still_waiting

    def _learn(self, tree: _WaitingTree, text: IntArray) -> None:
        accepted = spell_path(tree.tokens, tree.parents, tree.depths, text)
        known = tree.depths <= len(text)
        self._policy.observe_nodes(
            tree.depths[known],
            tree.path_log_confidence[known],
            accepted[known].astype(np.float64),
        )
