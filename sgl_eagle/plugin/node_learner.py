"""Hands the outcomes of drafted nodes to a policy that learns while it serves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sgl_eagle.plugin.compat_requests import completion_length, completion_tokens, is_over
from sgl_eagle.plugin.finished_step import STEPS_LOOKED_AT_TOGETHER, Drafted, FinishedStep
from sgl_eagle.plugin.foreseen_trees import ForeseenTrees, join_trees, note_common_sizes
from sgl_eagle_harness.node_outcome import spell_paths
from sgl_eagle_harness.policies.learning import (
    REFRESH_STEPS,
    AlikeRows,
    LearningPolicy,
    VerifiedRows,
    learning_pace,
)
from sgl_eagle_harness.types import IntArray

STEPS_BETWEEN_LESSONS = REFRESH_STEPS
"""Trees wait for each other, since to look at one of them takes nearly as long as at all. A lesson
comes between two refreshes of the policy, which uses no tree before."""
STEPS_BETWEEN_TREES = 4
"""Drafted steps of which one tree is followed, at first; fewer trees are at a slower learning pace.
What a refresh takes grows with the trees that it learns from, and the scheduler waits for it: with
a tree of every step 6 to 8 ms of 128 steps of 7 ms each (H200, 2026-11-30,
reports/serving/2026-11-30-h200-inflated-rows.html). Estimates forget over thousands of steps, so
that the fourth part of their trees tells nearly as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _WaitingTree:
    """A drafted tree whose text is still to come; `start` is its root's first child in the text."""

    request: Any
    start: int
    drafted: Drafted
    reach: int

    @property
    def is_settled(self) -> bool:
        num_known = completion_length(self.request) - self.start
        return num_known >= self.reach or is_over(self.request)

    def text(self) -> IntArray:
        return completion_tokens(self.request, self.start, self.start + self.reach)


class _Turn(NamedTuple):
    # Whose tree of a step is followed, and its completion tokens before the step.
    row: int
    start: int


class NodeLearner:
    """Follows one tree of every few steps until the text has caught up with it.

    One, in turn, whatever the batch: what learning costs does not grow with the load, and every
    request has its turn.
    """

    def __init__(
        self,
        policy: LearningPolicy,
        *,
        steps_between_lessons: int = STEPS_BETWEEN_LESSONS,
        steps_between_trees: int = STEPS_BETWEEN_TREES,
    ) -> None:
        """Start with nothing observed.

        Args:
            policy: Learns.
            steps_between_lessons: Steps after which it is told of the trees that are settled.
            steps_between_trees: Drafted steps of which one tree is followed.
        """
        self._policy = policy
        self._steps_between_lessons = steps_between_lessons
        self._steps_between_trees = steps_between_trees
        self._turn_ct = self._step_ct = 0
        self._steps_to_turn = steps_between_trees
        self._unseen: list[tuple[FinishedStep, _Turn | None]] = []
        self._waiting: list[_WaitingTree] = []
        self._ended: list[tuple[Drafted, IntArray]] = []

    def observe(self, step: FinishedStep) -> None:
        """Learn from one step.

        Args:
            step: Its tokens have not been added to the requests yet.
        """
        turn = self._next_turn(step) if step.noted is not None else None
        self._unseen.append((step, turn))
        if len(self._unseen) >= min(STEPS_LOOKED_AT_TOGETHER, self._steps_between_lessons):
            self._look()

    def _next_turn(self, step: FinishedStep) -> _Turn | None:
        self._steps_to_turn -= 1
        if self._steps_to_turn:
            return None
        self._steps_to_turn = self._steps_between_trees * learning_pace(self._step_ct)
        self._turn_ct += 1
        rows = step.counted_rows
        candidates = range(step.batch_size) if isinstance(rows, slice) else rows
        if not len(candidates):
            return None
        row = int(candidates[self._turn_ct % len(candidates)])
        return _Turn(row, completion_length(step.requests[row]))

    def _look(self) -> None:
        unseen, self._unseen = self._unseen, []
        note_common_sizes(step.drafted for step, _ in unseen)
        for step, turn in unseen:
            if turn is not None:
                self._follow(step, turn)
            self._step_ct += 1
            if self._step_ct % self._steps_between_lessons == 0:
                self._teach()
            self._learn_yield(step)

    def _learn_yield(self, step: FinishedStep) -> None:
        sizes, correct = step.common_sizes, step.num_correct_drafts
        if sizes is None:
            rows = step.counted_rows
            found = VerifiedRows.of_rows(
                batch_size=step.batch_size,
                elapsed_us=step.elapsed_us,
                host_bound=step.host_bound,
                depths=step.depths[rows],
                num_draft_tokens=step.num_draft_tokens[rows],
                num_correct_drafts=np.array(correct, np.int64),
            )
        else:
            alike = AlikeRows(sizes.depth, sizes.num_draft_tokens, correct)
            found = VerifiedRows(
                batch_size=step.batch_size,
                elapsed_us=step.elapsed_us,
                host_bound=step.host_bound,
                groups=(alike,) if correct else (),
            )
        self._policy.observe_step(found)

    def forget(self, rid: str) -> None:
        """Note the end of a request: more of its text will not come.

        Args:
            rid: Its name; its tokens are complete.
        """
        self._look()
        ended = [tree for tree in self._waiting if tree.request.rid == rid]
        if ended:
            self._waiting = [tree for tree in self._waiting if tree.request.rid != rid]
            self._ended += ((tree.drafted, tree.text()) for tree in ended)

    def _follow(self, step: FinishedStep, turn: _Turn) -> None:
        row, sizes = turn.row, step.common_sizes
        reach = int(step.depths[row]) if sizes is None else sizes.depth
        if step.drafted is None or not reach:
            return
        request = step.requests[row]
        self._waiting.append(
            _WaitingTree(
                request=request,
                start=turn.start,
                drafted=step.drafted.row(row),
                reach=reach,
            )
        )

    def _teach(self) -> None:
        settled = [tree for tree in self._waiting if tree.is_settled]
        if settled:
            self._waiting = [tree for tree in self._waiting if not tree.is_settled]
        lesson = [*self._ended, *((tree.drafted, tree.text()) for tree in settled)]
        self._ended = []
        for drafted, texts in _alike(lesson):
            self._teach_together(drafted, texts)

    def _teach_together(self, drafted: Drafted, texts: list[IntArray]) -> None:
        trees, lengths = drafted.trees, np.array([len(text) for text in texts])
        padded = np.zeros((len(texts), int(lengths.max())), np.int64)
        for row, text in enumerate(texts):
            padded[row, : len(text)] = text
        accepted = spell_paths(trees, padded, lengths).astype(np.float64)
        known = trees.valid & (trees.depths <= lengths[:, None])
        whole = np.asarray(known.all(axis=1)).tolist()
        for row, reaches_all in enumerate(whole):
            nodes = slice(None) if reaches_all else known[row]
            self._policy.observe_nodes(
                trees.depths[nodes], trees.path_log_confidence[row, nodes], accepted[row, nodes]
            )


def _alike(
    lesson: Iterable[tuple[Drafted, IntArray]],
) -> Iterable[tuple[Drafted, list[IntArray]]]:
    # Trees that can be put together at once, and those that are there already one by one.
    foreseen: dict[object, list[tuple[ForeseenTrees, IntArray]]] = {}
    for drafted, text in lesson:
        if isinstance(drafted, ForeseenTrees):
            key = drafted.layout, drafted.limits
            foreseen.setdefault(key, []).append((drafted, text))
        else:
            yield drafted, [text]
    for group in foreseen.values():
        yield join_trees([drafted for drafted, _ in group]), [text for _, text in group]
