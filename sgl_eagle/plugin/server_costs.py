"""The cost table that a server decides by: from its cache, or measured when it starts."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sgl_eagle.plugin import compat_profile
from sgl_eagle.plugin.cost_cache import CostRange, read_cached, write_cached
from sgl_eagle.plugin.draft_backlog import window_size
from sgl_eagle.plugin.measuring_turn import device_name, measuring_turn
from sgl_eagle.plugin.profile_grid import BUDGET_S, MOST_DISAGREEMENT, GridProfiler, grid_for
from sgl_eagle.plugin.ranks import Ranks
from sgl_eagle.plugin.row_clock import marks_of
from sgl_eagle.plugin.server_flags import PluginSettings
from sgl_eagle.plugin.server_profile import ServerRounds
from sgl_eagle.reference.decision_time import with_decision_times
from sgl_eagle_harness.cost_file import CostFile
from sgl_eagle_harness.cost_table import CostSetup
from sgl_eagle_harness.types import TreeLimits
from sgl_eagle_tuner.provenance import collect_provenance

logger = logging.getLogger(__name__)

PATIENCE_S = 3 * BUDGET_S
"""How long a server waits for its turn: two others may take all their time, and some beyond it."""


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
    runs_ahead = marks_of(str(worker.device)).host_runs_ahead

    def read_shared(*, looks: bool) -> CostFile | None:
        cached = None
        if cache is not None and looks:
            cached = read_cached(cache, setup, wanted, launches=runs_ahead)
        shared = ranks.share_text(None if cached is None else cached.model_dump_json())
        if shared is None:
            return None
        logger.info("SGL_EAGLE takes its costs from the cache in %s", settings.cost_cache)
        return CostFile.model_validate_json(shared) if cached is None else cached

    known = read_shared(looks=True)
    if known is not None:
        return known
    name = device_name(str(worker.device))
    turn = measuring_turn(name, patience_s=PATIENCE_S) if ranks.leads else nullcontext(False)
    with turn as waited:
        known = read_shared(looks=waited)  # who was first may have been a server like this one
        if known is not None:
            return known
        measured = _measure(worker, limits, sizes, wanted, setup, ranks)
        # What a rank makes of its own times could differ, down to the kind of its policy.
        first = ranks.share_text(measured.record.model_dump_json())
        if cache is not None:
            _keep(cache, measured)
    return measured.record if first is None else CostFile.model_validate_json(first)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """A table, and whether a device that did something else as well may have made it."""

    record: CostFile
    disagreement: float
    is_restless: bool


def _keep(folder: Path, measured: _Measured) -> None:
    if measured.is_restless:
        logger.warning(
            "SGL_EAGLE serves by costs that it does not keep: rounds took up to %.2f times as "
            "long, or as short, when they were repeated, where %.1f is allowed; something else "
            "used the device or the host, and the next start measures anew",
            *(measured.disagreement, MOST_DISAGREEMENT),
        )
        return
    path = write_cached(folder, measured.record)
    if path is not None:
        logger.info("SGL_EAGLE keeps its costs in %s", path)


def _measure(
    worker: Any,
    limits: TreeLimits,
    sizes: tuple[int, ...],
    wanted: CostRange,
    setup: CostSetup,
    ranks: Ranks,
) -> _Measured:
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
    rounds = ServerRounds(worker, limits, window=window_size(sizes))
    # A rank that gave up earlier than another would leave it waiting within a round.
    profiler = GridProfiler(
        grid, rounds, now=ranks.clock(time.perf_counter), agree=ranks.share_number
    )
    try:
        # As SGLang serves; what inference mode allocates, serving may not write.
        with torch.no_grad():
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
        "SGL_EAGLE measured its costs in %.1f s: %d rounds, at least %d of each kind; passes were "
        "within a factor of %.2f",
        *(time.perf_counter() - started, profiler.num_rounds, profiler.fewest_repeats),
        profiler.disagreement,
    )
    return _Measured(
        record=record, disagreement=profiler.disagreement, is_restless=profiler.is_restless
    )
