"""Measures what decode rounds cost on this server, through the worker that will serve.

Rounds run on requests that do not exist: their cache rows point at slots of the empty pool. Before
the first real request nothing reads what they leave there.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from sgl_eagle.plugin import compat_profile
from sgl_eagle.plugin.cost_cache import CostRange, read_cached, write_cached
from sgl_eagle.plugin.profile_grid import GridProfiler, RoundSample, grid_for
from sgl_eagle.plugin.ranks import Ranks
from sgl_eagle.plugin.request_tiers import RequestTiers
from sgl_eagle.plugin.round_clock import RoundClock, Stage
from sgl_eagle.plugin.server_flags import PluginSettings
from sgl_eagle.reference.decision_time import with_decision_times
from sgl_eagle_harness.cost_file import CostFile
from sgl_eagle_harness.cost_table import CostSetup
from sgl_eagle_harness.policies.confidence_order import ConfidenceOrder
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.policies.tier import SpeculationTier
from sgl_eagle_harness.types import BatchContext, BoolArray, TreeLimits
from sgl_eagle_tuner.provenance import collect_provenance

logger = logging.getLogger(__name__)

ROUNDS_IN_A_ROW = 4
NUM_ROWS_OF_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class _Probe(Eagle2Policy):
    """EAGLE-2 trees that the host lays out, as it does those of the price rule.

    Attributes:
        asks: Whether the host waits for every level, as if there were something to decide.
    """

    asks: bool = False

    @property
    def confidence_order(self) -> ConfidenceOrder:
        return ConfidenceOrder(num_certain_steps=0 if self.asks else self.limits.num_steps - 1)


@dataclass(frozen=True, kw_only=True)
class _PlainProbe(_Probe):
    """Could draft, and never does: the tier of a speculating server that decodes plainly."""

    def should_speculate(self, batch: BatchContext) -> BoolArray:
        return np.zeros(batch.num_rows, np.bool_)


_OF_VERIFY: tuple[Stage, ...] = ("roots", "pack", "wait", "verify")


class ServerRounds:
    """Runs single rounds of the worker on made-up requests."""

    def __init__(self, worker: Any, limits: TreeLimits) -> None:
        """Prepare.

        Args:
            worker: Our worker, its graphs captured, serving nobody yet.
            limits: Upper limits of the trees.
        """
        self._worker, self._limits = worker, limits
        self._clock = RoundClock(now=self._synchronised_now)

    def time_round(self, batch_size: int, num_tokens: int, context_len: int) -> RoundSample:
        """Run one round.

        Args:
            batch_size: Requests.
            num_tokens: Tokens verified a request, root included.
            context_len: Cached tokens a request; as many as leave room for the tree, at most.

        Returns:
            Its times.
        """
        policy = probe_policy(self._limits, num_tokens)
        return self._time_round(policy, batch_size, num_tokens, context_len)

    def exchange_us(self) -> float:
        """What a draft level takes longer if the host waits for it, for one request.

        Rounds follow each other as while serving: a host that waits for nothing prepares a round
        while the device is busy with the one before, and one that waits for levels cannot.

        Returns:
            Microseconds, at least 0: a launch of its own, a copy, the wait for it, and a level's
            share of what the device waits for the host.
        """
        num_levels = self._limits.num_steps - 1
        if not num_levels:
            return 0.0
        asked_us = self._time_rounds(_Probe(limits=self._limits, asks=True))
        return (
            max(0.0, asked_us - self._time_rounds(Eagle2Policy(limits=self._limits))) / num_levels
        )

    def _time_rounds(self, policy: Eagle2Policy) -> float:
        # Microseconds of one of several rounds in a row, nothing waited for in between.
        times = []
        for num_rounds in (1, *[ROUNDS_IN_A_ROW] * NUM_ROWS_OF_ROUNDS):
            batches = [
                compat_profile.make_decode_batch(self._worker, batch_size=1, context_len=1)
                for _ in range(num_rounds)
            ]
            tier = SpeculationTier()
            tier.speculates = True
            tiers = RequestTiers({batches[0].reqs[0].rid: tier})
            with self._worker.probing(policy, RoundClock(), tiers):
                started = self._synchronised_now()
                for batch in batches:
                    self._worker.forward_batch_generation(batch)
                times.append(1e6 * (self._synchronised_now() - started) / num_rounds)
        return min(times[1:])  # the first round allocates

    def _time_round(
        self, policy: _Probe, batch_size: int, num_tokens: int, context_len: int
    ) -> RoundSample:
        batch = compat_profile.make_decode_batch(
            self._worker, batch_size=batch_size, context_len=context_len
        )
        tiers = {request.rid: SpeculationTier() for request in batch.reqs}
        for tier in tiers.values():
            tier.speculates = num_tokens > 1
        with self._worker.probing(policy, self._clock, RequestTiers(tiers)):
            self._worker.forward_batch_generation(batch)
        times = self._clock.take(1)
        stage_us = {} if times is None else times.stage_us
        num_draft_steps = 0 if num_tokens == 1 else policy.limits.num_steps - 1
        return RoundSample(
            # With what is asked of the device to find the trees and to lay them out.
            verify_us=sum(stage_us.get(stage, 0.0) for stage in _OF_VERIFY),
            extend_us=stage_us["extend"] if num_tokens > 1 else None,
            draft_step_us=stage_us["draft"] / num_draft_steps if num_draft_steps else None,
        )

    def _synchronised_now(self) -> float:
        # Launches return before the work is done: without this, time would go to a later stage.
        if str(self._worker.device).startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()


def probe_policy(limits: TreeLimits, num_tokens: int) -> _Probe:
    """A policy that verifies so many tokens, from trees as shallow as possible.

    Args:
        limits: Upper limits of the server.
        num_tokens: Tokens verified, root included; 1 decodes plainly.

    Returns:
        Trees of two levels at least where the limits allow, so that a draft step is timed too.
    """
    if num_tokens == 1:
        return _PlainProbe(limits=limits)
    depth = min(2, limits.num_steps)
    while (
        TreeLimits(num_steps=depth, topk=limits.topk, num_draft_tokens=2).largest_num_draft_tokens
        < num_tokens
    ):
        depth += 1
    return _Probe(limits=TreeLimits(num_steps=depth, topk=limits.topk, num_draft_tokens=num_tokens))


def measured_costs(
    worker: Any,
    limits: TreeLimits,
    sizes: tuple[int, ...],
    settings: PluginSettings,
    *,
    setup: CostSetup,
    ranks: Ranks,
) -> CostFile:
    """The cost table of this server, from the cache or measured now.

    Args:
        worker: Our worker, ready to serve.
        limits: Upper limits of the trees.
        sizes: Verify sizes, ascending from 1.
        settings: Which cache to use.
        setup: What is served.
        ranks: All measure together and get the table of the first, which alone uses the cache.

    Returns:
        The record.

    Raises:
        CostTableError: If the time limit does not suffice for the smallest grid.
    """
    wanted = CostRange(
        batch_size=int(worker.server_args.max_running_requests),
        num_tokens=sizes[-1],
        width=limits.topk,
        context_len=int(worker.target_worker.model_runner.model_config.context_len),
    )
    cache = settings.cost_cache if ranks.leads else None
    cached = None if cache is None else read_cached(cache, setup, wanted)
    shared = ranks.share_text(None if cached is None else cached.model_dump_json())
    if shared is not None:
        logger.info("SGL_EAGLE takes its costs from the cache in %s", settings.cost_cache)
        return CostFile.model_validate_json(shared) if cached is None else cached
    record = _measure(worker, limits, sizes, wanted, setup, ranks)
    # What a rank makes of its own times could differ, down to the kind of its policy.
    first = ranks.share_text(record.model_dump_json())
    record = record if first is None else CostFile.model_validate_json(first)
    path = None if cache is None else write_cached(cache, record)
    if path is not None:
        logger.info("SGL_EAGLE keeps its costs in %s", path)
    return record


def _measure(
    worker: Any,
    limits: TreeLimits,
    sizes: tuple[int, ...],
    wanted: CostRange,
    setup: CostSetup,
    ranks: Ranks,
) -> CostFile:
    grid = grid_for(
        largest_batch=wanted.batch_size,
        sizes=sizes,
        longest_context=wanted.context_len,
        width=wanted.width,
    )
    logger.info(
        "SGL_EAGLE measures its costs: batches %s, %s tokens verified, contexts %s",
        *(grid.batch_sizes, grid.num_tokens, grid.context_lens),
    )
    started = time.perf_counter()
    rounds = ServerRounds(worker, limits)
    # A rank that gave up earlier than another would leave it waiting within a round.
    profiler = GridProfiler(grid, rounds.time_round, now=ranks.clock(time.perf_counter))
    try:
        with torch.inference_mode():
            table = profiler.measure(setup)
            exchange_us = rounds.exchange_us()
    finally:
        compat_profile.forget_decode_batches(worker)
    table = with_decision_times(table)
    record = CostFile.from_table(
        replace(table, decide_us=table.decide_us + exchange_us),
        num_repeats=profiler.fewest_repeats,
        created=datetime.now(UTC),
        commit=collect_provenance(seed=0).commit,
    )
    logger.info(
        "SGL_EAGLE measured its costs in %.1f s: %d rounds, at least %d of each kind",
        *(time.perf_counter() - started, profiler.num_rounds, profiler.fewest_repeats),
    )
    return record
