"""Runs rows of decode rounds through the worker that will serve, and takes their times.

Rounds follow each other as while serving, so that what the host does behind the device's back
counts for nothing, as it does then. They run on requests that do not exist: their cache rows point
at slots of the empty pool. Before the first real request nothing reads what they leave there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sgl_eagle.plugin import compat_profile
from sgl_eagle.plugin.profile_grid import RoundSample
from sgl_eagle.plugin.round_clock import Stage
from sgl_eagle.plugin.row_clock import RowClock, marks_of
from sgl_eagle_harness.policies.confidence_order import ConfidenceOrder
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.policies.tier import SpeculationTier
from sgl_eagle_harness.types import BatchContext, BoolArray, TreeLimits

ROUNDS_IN_A_ROW = 3
"""Where the host runs ahead of the device: the first finds it idle, and does not count. Elsewhere
one round is as good as several."""
NUM_EXCHANGE_ROWS = 3


@dataclass(frozen=True, kw_only=True)
class _AskedProbe(Eagle2Policy):
    """EAGLE-2 trees of a host that waits for every level, as if there were something to decide."""

    @property
    def confidence_order(self) -> ConfidenceOrder:
        return ConfidenceOrder(num_certain_steps=0)


@dataclass(frozen=True, kw_only=True)
class _PlainProbe(Eagle2Policy):
    """Could draft, and never does: the tier of a speculating server that decodes plainly."""

    @property
    def confidence_order(self) -> ConfidenceOrder:
        # Without a promise about trees, so that it is asked who drafts.
        return ConfidenceOrder(num_certain_steps=0)

    def should_speculate(self, batch: BatchContext) -> BoolArray:
        return np.zeros(batch.num_rows, np.bool_)


class ServerRounds:
    """Runs rows of rounds of the worker on made-up requests."""

    def __init__(self, worker: Any, limits: TreeLimits, *, window: int) -> None:
        """Prepare.

        Args:
            worker: Our worker, its graphs captured, serving nobody yet.
            limits: Upper limits of the trees.
            window: Tokens of a request with which its draft catches up after plain rounds.
        """
        self._worker, self._limits, self._window = worker, limits, window
        self._marks = marks_of(str(worker.device))
        self._num_rounds = ROUNDS_IN_A_ROW if self._marks.host_runs_ahead else 1

    def warm_up(self, batch_size: int, num_tokens: int, context_len: int) -> None:
        """Run what allocates and compiles.

        Args:
            batch_size: Requests.
            num_tokens: Tokens verified a request, root included; 1 decodes plainly.
            context_len: Cached tokens a request.
        """
        self._run(probe_policy(self._limits, num_tokens), 1, batch_size, context_len)

    def time_rounds(self, batch_size: int, num_tokens: int, context_len: int) -> list[RoundSample]:
        """Run some rounds that follow each other as while serving.

        Args:
            batch_size: Requests.
            num_tokens: Tokens verified a request, root included; 1 decodes plainly, and the last
                of the rounds catches up with a window of tokens.
            context_len: Cached tokens a request; as many as leave room for the tree, at most.

        Returns:
            The times of each that counts.
        """
        policy = probe_policy(self._limits, num_tokens)
        clock = self._run(policy, self._num_rounds, batch_size, context_len)
        rows = zip(_counted(clock.rounds_us()), _counted(clock.launches_us()), strict=True)
        return [self._sample(stage_us, launch_us, num_tokens) for stage_us, launch_us in rows]

    def exchange_us(self) -> float:
        """What a draft level takes longer if the host waits for it, for one request.

        A host that waits for nothing prepares a round while the device is busy with the one
        before, and one that waits for levels cannot.

        Returns:
            Microseconds, at least 0: a launch of its own, a copy, the wait for it, a level's share
            of choosing and laying out the tree, and of what the device waits for the host.
        """
        num_levels = self._limits.num_steps - 1
        if not num_levels:
            return 0.0
        asked_us, unasked_us = (
            self._round_us(policy(limits=self._limits)) for policy in (_AskedProbe, Eagle2Policy)
        )
        return max(0.0, asked_us - unasked_us) / num_levels

    def _round_us(self, policy: Eagle2Policy) -> float:
        self._run(policy, 1, 1, 1)
        rows = (self._run(policy, self._num_rounds, 1, 1) for _ in range(NUM_EXCHANGE_ROWS))
        return float(
            np.median([sum(us.values()) for clock in rows for us in _counted(clock.rounds_us())])
        )

    def _run(
        self, policy: Eagle2Policy, num_rounds: int, batch_size: int, context_len: int
    ) -> RowClock:
        drafts = not isinstance(policy, _PlainProbe)
        if not drafts:
            # The last finds the window full. What the draft has not seen are cached tokens, too.
            num_rounds, context_len = num_rounds + 1, max(context_len, self._window + 1)
        batches = compat_profile.make_decode_batches(
            self._worker, num_rounds, batch_size=batch_size, context_len=context_len
        )
        tiers = {request.rid: SpeculationTier() for request in batches[0].reqs}
        for tier in tiers.values():
            tier.speculates = drafts
        num_unseen = 0 if drafts else max(0, self._window + 1 - num_rounds)
        clock = RowClock(self._marks)
        self._marks.wait()
        with self._worker.probing(policy, clock, tiers, num_unseen=num_unseen):
            for batch in batches:
                self._worker.forward_batch_generation(batch)
        self._marks.wait()
        return clock

    def _sample(
        self, stage_us: dict[Stage, float], launch_us: dict[Stage, float], num_tokens: int
    ) -> RoundSample:
        left_out: tuple[Stage, ...] = ("extend",) if num_tokens == 1 else ()
        draft_us, extend_us = stage_us.get("draft"), stage_us.get("extend")
        return RoundSample(
            verify_us=sum(us for stage, us in stage_us.items() if stage not in _OF_DRAFT),
            extend_us=extend_us,
            # The roots' children come with the first step.
            draft_step_us=(
                None if num_tokens == 1 else (draft_us or 0.0) / max(1, self._limits.num_steps - 1)
            ),
            launch_us=(
                sum(us for stage, us in launch_us.items() if stage not in left_out)
                if self._marks.host_runs_ahead
                else None
            ),
        )


def _counted(rounds: list[dict[Stage, float]]) -> list[dict[Stage, float]]:
    # All but the first, or the only one.
    return rounds[1:] or rounds


_OF_DRAFT: tuple[Stage, ...] = ("draft", "extend")


def probe_policy(limits: TreeLimits, num_tokens: int) -> Eagle2Policy:
    """A policy that verifies so many tokens, and leaves nothing to decide.

    Args:
        limits: Upper limits of the server.
        num_tokens: Tokens verified, root included; 1 decodes plainly.

    Returns:
        Trees of all levels, which is how most plans draft: one graph runs all of their steps.
    """
    if num_tokens == 1:
        return _PlainProbe(limits=limits)
    return Eagle2Policy(limits=replace(limits, num_draft_tokens=num_tokens))
