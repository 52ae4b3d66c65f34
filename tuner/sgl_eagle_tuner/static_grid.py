"""Every EAGLE-2/3 setting that a trace covers, replayed together.

The frontier of EAGLE-2 does not depend on num_steps or num_draft_tokens, so one beam per topk holds
the trees of all settings with that topk: those of fewer steps are its first levels, and a node is
verified if its rank among them is below num_draft_tokens - 1. Accepted nodes form one chain whose
ranks rise with depth; counting the ranks below the budget gives the accepted tokens of every
setting at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.policies.open_decisions import open_decisions
from sgl_eagle_harness.trace_schema import TraceHeader
from sgl_eagle_harness.types import (
    BatchContext,
    BoolArray,
    CandidateTrees,
    IntArray,
    TreeLimits,
    largest_tree_size,
)
from sgl_eagle_tuner.recorded_drafter import RecordedDrafter
from sgl_eagle_tuner.replay import StepTable, chunk_positions, tokens_left

GRID_NUM_DRAFT_TOKENS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)
"""Verify sizes of the grid, root included; a chain of s steps has s + 1 instead."""

UNRANKED = np.iinfo(np.int64).max


def grid_limits(header: TraceHeader, costs: CostTable) -> list[TreeLimits]:
    """Settings that both the trace and the cost table cover.

    Args:
        header: Of the trace.
        costs: Measured costs.

    Returns:
        All combinations of num_steps, topk and num_draft_tokens; every chain once, since a chain
        cut short by its budget is a shorter chain with useless draft steps.
    """
    largest = int(costs.target.num_tokens[-1])
    widest = int(costs.draft.num_tokens[-1])
    found = []
    for topk in (beam for beam in header.beams if beam <= widest):
        for num_steps in range(1, header.num_steps + 1):
            drafted = largest_tree_size(num_steps=num_steps, topk=topk)
            sizes = (num_steps + 1,) if topk == 1 else GRID_NUM_DRAFT_TOKENS
            found += [
                TreeLimits(num_steps=num_steps, topk=topk, num_draft_tokens=size)
                for size in sizes
                if size <= min(drafted, largest)
            ]
    return found


def replay_grid(
    trace: DenseTrace, settings: list[TreeLimits], *, batch_size: int = 1
) -> Iterator[tuple[TreeLimits, StepTable]]:
    """Replay many EAGLE-2/3 settings at every position.

    Args:
        trace: P positions.
        settings: Limits to replay.
        batch_size: Noted in the tables; these policies decide the same at every size.

    Yields:
        Each setting with the table that `replay_positions` would make of its policy, expectations
        left out.
    """
    left = tokens_left(trace)
    for topk in sorted({limits.topk for limits in settings}):
        of_topk = [limits for limits in settings if limits.topk == topk]
        beam = _replay_beam(trace, topk, max(limits.num_steps for limits in of_topk))
        for limits in of_topk:
            yield limits, _table(beam, limits, left, batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beam:
    """One topk at P positions, S steps deep.

    Attributes:
        ranks: [P, S, S] int64; [p, s, d] is the rank of the accepted node of depth d + 1 among the
            nodes of the first s + 1 levels, `UNRANKED` where the text has left the beam.
        widths: [P, S] int64, nodes expanded in each step, the root included.
        num_drafted: [P, S] int64, nodes of each level.
        missing: [P, S] bool, the step asked for something that the trace does not hold.
    """

    ranks: IntArray
    widths: IntArray
    num_drafted: IntArray
    missing: BoolArray


def _replay_beam(trace: DenseTrace, topk: int, num_steps: int) -> _Beam:
    limits = TreeLimits(num_steps=num_steps, topk=topk, num_draft_tokens=2)
    num_rows = chunk_positions(limits.largest_num_draft_tokens)
    parts = [
        _replay_beam_chunk(trace, limits, slice(start, start + num_rows))
        for start in range(0, trace.num_positions, num_rows)
    ]
    return _Beam(
        **{
            item.name: np.concatenate([getattr(part, item.name) for part in parts])
            for item in fields(_Beam)
        }
    )


def _replay_beam_chunk(trace: DenseTrace, limits: TreeLimits, rows: slice) -> _Beam:
    start, stop, _ = rows.indices(trace.num_positions)
    drafter = RecordedDrafter(trace, start, stop)
    batch = BatchContext(
        batch_size=1,
        context_len=trace.context_len[start:stop],
        num_pending=np.ones(stop - start, np.int64),
    )
    trees = grow_trees(drafter, Eagle2Policy(limits=limits), batch)
    handles = np.where(trees.valid, trees.handles, 0)
    on_path = np.take_along_axis(trace.on_path[start:stop], handles, axis=1) & trees.valid
    num_drafted = np.add.reduceat(trees.valid, trees.level_starts, axis=1, dtype=np.int64)
    return _Beam(
        ranks=_chain_ranks(trees, on_path, limits.num_steps),
        widths=_pad_levels(np.stack(drafter.widths, axis=1), limits.num_steps),
        num_drafted=_pad_levels(num_drafted, limits.num_steps),
        missing=_pad_levels(np.stack(drafter.missing, axis=1), limits.num_steps),
    )


def _pad_levels(values: npt.NDArray[Any], num_steps: int) -> npt.NDArray[Any]:
    # A beam ends early only where the trace ran out in every row.
    return np.pad(values, ((0, 0), (0, num_steps - values.shape[1])))


def _chain_ranks(trees: CandidateTrees, on_path: BoolArray, num_steps: int) -> IntArray:
    """Rank the accepted node of each depth among the nodes of every number of levels.

    Args:
        trees: B rows, L <= S levels.
        on_path: [B, N] bool, at most one node a level.
        num_steps: S.

    Returns:
        [B, S, S] int64, see `_Beam.ranks`.
    """
    ranks = np.full((trees.num_rows, num_steps, num_steps), UNRANKED)
    scores, columns = trees.path_log_confidence, np.arange(trees.num_nodes)
    bounds = [*trees.level_starts, trees.num_nodes]
    for depth, (start, end) in enumerate(itertools.pairwise(bounds)):
        rows = np.flatnonzero(on_path[:, start:end].any(axis=1))
        if not rows.size:
            break
        column = start + on_path[rows, start:end].argmax(axis=1)[:, None]
        own = np.take_along_axis(scores[rows], column, axis=1)
        # Equal scores are settled by draft order, as in `tree_build`.
        ahead = scores[rows] > own
        ahead |= (scores[rows] == own) & (columns < column)
        counts = np.add.reduceat(ahead, trees.level_starts, axis=1, dtype=np.int64)
        num_levels = counts.shape[1]
        ranks[rows, depth:num_levels, depth] = np.cumsum(counts, axis=1)[:, depth:]
        ranks[rows, num_levels:, depth] = ranks[rows, num_levels - 1, depth][:, None]
    return ranks


def _table(beam: _Beam, limits: TreeLimits, left: IntArray, batch_size: int) -> StepTable:
    policy = Eagle2Policy(limits=limits)
    num_steps, budget = limits.num_steps, limits.num_draft_tokens - 1
    num_correct_drafts = (beam.ranks[:, num_steps - 1, :num_steps] < budget).sum(axis=1)
    widths = beam.widths[:, 1:num_steps]
    num_drafted = beam.num_drafted[:, :num_steps].sum(axis=1)
    num_levels = 1 + (widths > 0).sum(axis=1)
    return StepTable(
        policy_name=policy.name,
        batch_size=batch_size,
        num_accept_tokens=np.minimum(num_correct_drafts + 1, left),
        num_draft_tokens=1 + np.minimum(num_drafted, budget),
        num_drafted=num_drafted,
        widths=widths,
        num_decisions=np.minimum(num_levels, num_steps - 1),
        open_decisions=open_decisions(policy, batch_size),
        uncovered=np.asarray(beam.missing[:, :num_steps].any(axis=1)),
        expected_accept_tokens=None,
    )
