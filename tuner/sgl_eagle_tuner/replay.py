"""What a policy would have done at every recorded position, from a dense trace.

The trace's text does not depend on the policy. At temperature 0 it is the target's greedy text. At
a higher temperature, target-only tree sampling draws one token of the target at the root and at
every accepted node and keeps a draft if it is that token. Drawing the text first, and accepting the
path that spells it, is the same experiment with the draws written down in advance, and the recorded
text is such a draw: accepted tokens and step boundaries along it have exactly the engine's law.
`StepTable.expected_accept_tokens` additionally averages over the draws of each single step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_eagle_harness.confidence import sum_path_logs
from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.policies.open_decisions import OpenDecisions, open_decisions
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.types import (
    NO_NODE,
    BatchContext,
    BoolArray,
    FloatArray,
    IntArray,
)
from sgl_eagle_tuner.recorded_drafter import RecordedDrafter

CHUNK_NODES = 1 << 16
"""Drafted nodes in flight: small enough for the processor's cache, large enough that NumPy's cost
per call does not show."""
MIN_CHUNK_POSITIONS = 512
MAX_CHUNK_POSITIONS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """One speculative step at each of P positions; which of them a run visits is `walk`'s matter.

    Attributes:
        policy_name: Policy that was replayed.
        batch_size: Batch size that its decisions saw.
        num_accept_tokens: [P] int64, tokens the step emits: correct drafts and the bonus token, cut
            at the end of the recorded text as the engine's length limit or stop token cuts.
        num_draft_tokens: [P] int64, nodes verified, root included.
        num_drafted: [P] int64, nodes drafted, root excluded.
        widths: [P, S - 1] int64, nodes expanded in each draft step after the first; 0 if not run.
        num_decisions: [P] int64, times the policy was asked to go on drafting.
        open_decisions: What of them, and of choosing trees, an engine that drafts ahead asks for.
        uncovered: [P] bool, the trace lacked something the policy asked for: the row's tree is
            smaller than the engine's would have been.
        expected_accept_tokens: [P] float64, mean of the tokens a step emits over the target's
            draws, not cut at the end of the text; None if the trace has no target probabilities.
    """

    policy_name: str
    batch_size: int
    num_accept_tokens: IntArray
    num_draft_tokens: IntArray
    num_drafted: IntArray
    widths: IntArray
    num_decisions: IntArray
    open_decisions: OpenDecisions
    uncovered: BoolArray
    expected_accept_tokens: FloatArray | None

    @property
    def num_positions(self) -> int:
        """P."""
        return len(self.num_accept_tokens)

    @property
    def uncovered_share(self) -> float:
        """Share of positions whose tree the trace does not fully hold."""
        return float(self.uncovered.mean()) if self.num_positions else 0.0


def replay_positions(trace: DenseTrace, policy: SpecPolicy, *, batch_size: int = 1) -> StepTable:
    """Speculate once at every position of a trace.

    Positions are independent of each other, so they are processed as the rows of one draft loop,
    in chunks that stay in the processor's cache.

    Args:
        trace: P positions.
        policy: Any policy; one without limits decodes plainly everywhere.
        batch_size: Requests that are decoded together, as far as the policy's costs go.

    Returns:
        The table.
    """
    limits = policy.limits
    if limits is None:
        return plain_table(trace, policy.name, batch_size=batch_size)
    num_rows = chunk_positions(limits.largest_num_draft_tokens)
    chunks = [
        _replay_chunk(trace, policy, batch_size, slice(start, start + num_rows))
        for start in range(0, trace.num_positions, num_rows)
    ]
    merged = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    # The engine asks after every level but the last it may draft; "no" is an answer too.
    num_levels = 1 + (merged["widths"] > 0).sum(axis=1)
    return StepTable(
        policy_name=policy.name,
        batch_size=batch_size,
        num_accept_tokens=np.minimum(merged["num_correct_drafts"] + 1, tokens_left(trace)),
        num_draft_tokens=merged["num_draft_tokens"],
        num_drafted=merged["num_drafted"],
        widths=merged["widths"],
        num_decisions=np.minimum(num_levels, limits.num_steps - 1),
        open_decisions=open_decisions(policy, batch_size),
        uncovered=merged["uncovered"],
        expected_accept_tokens=merged.get("expected_accept_tokens"),
    )


def plain_table(trace: DenseTrace, policy_name: str, *, batch_size: int = 1) -> StepTable:
    """The table of a policy that never drafts.

    Args:
        trace: P positions.
        policy_name: Its name.
        batch_size: Requests that are decoded together.

    Returns:
        One token verified and one emitted everywhere.
    """
    num_positions = trace.num_positions
    ones, zeros = np.ones(num_positions, np.int64), np.zeros(num_positions, np.int64)
    return StepTable(
        policy_name=policy_name,
        batch_size=batch_size,
        num_accept_tokens=ones,
        num_draft_tokens=ones,
        num_drafted=zeros,
        widths=np.zeros((num_positions, 0), np.int64),
        num_decisions=zeros,
        open_decisions=OpenDecisions(num_certain_steps=0, chooses_tree=False),
        uncovered=np.zeros(num_positions, np.bool_),
        expected_accept_tokens=None if trace.target_log_probs is None else ones.astype(np.float64),
    )


def chunk_positions(num_nodes: int) -> int:
    """Positions to replay at a time.

    Args:
        num_nodes: Nodes that one position may draft.

    Returns:
        Number of positions.
    """
    return min(max(CHUNK_NODES // num_nodes, MIN_CHUNK_POSITIONS), MAX_CHUNK_POSITIONS)


def tokens_left(trace: DenseTrace) -> IntArray:
    """Tokens that the recorded text still holds after each position's root.

    Args:
        trace: P positions.

    Returns:
        [P] int64, 1 at the last position of a prompt.
    """
    return trace.last_row - np.arange(trace.num_positions) + 1


def _replay_chunk(
    trace: DenseTrace, policy: SpecPolicy, batch_size: int, rows: slice
) -> dict[str, npt.NDArray[Any]]:
    start, stop, _ = rows.indices(trace.num_positions)
    drafter = RecordedDrafter(trace, start, stop)
    batch = BatchContext(
        batch_size=batch_size,
        context_len=trace.context_len[start:stop],
        # Only `should_speculate` reads this, and it is asked in the walk, where the count is known.
        num_pending=np.ones(stop - start, np.int64),
    )
    trees = grow_trees(drafter, policy, batch)
    columns = policy.select_verify(trees, batch)
    chosen = columns != NO_NODE
    handles = np.take_along_axis(trees.handles, np.where(chosen, columns, 0), axis=1)
    assert policy.limits is not None  # the caller deals with plain decoding
    widths = np.zeros((stop - start, policy.limits.num_steps - 1), np.int64)
    for level, width in enumerate(drafter.widths[1:]):
        widths[:, level] = width
    arrays = {
        # The verified tree is closed under parents, so its nodes on the text form one chain.
        "num_correct_drafts": _count(trace.on_path[start:stop], handles, chosen),
        "num_draft_tokens": 1 + chosen.sum(axis=1),
        "num_drafted": trees.valid.sum(axis=1),
        "widths": widths,
        "uncovered": drafter.uncovered,
    }
    if trace.target_log_probs is not None:
        path_logs = sum_path_logs(
            trace.target_log_probs[start:stop],
            trace.parents[start:stop].astype(np.int64),
            trace.depths[start:stop].astype(np.int64),
        )
        probs = np.exp(np.take_along_axis(path_logs, handles, axis=1).astype(np.float64))
        arrays["expected_accept_tokens"] = 1 + np.where(chosen, probs, 0.0).sum(axis=1)
    return arrays


def _count(marked: BoolArray, columns: IntArray, chosen: BoolArray) -> IntArray:
    hits = np.take_along_axis(marked, columns, axis=1) & chosen
    return np.asarray(hits.sum(axis=1), np.int64)
