"""Which cases one run times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from sgl_eagle_kernels.bench.case import Case
from sgl_eagle_kernels.bench.head_cases import (
    CANDIDATES,
    TOPK,
    choose_tile_size,
    cluster_case,
    full_case,
    low_rank_case,
    our_full_case,
    read_case,
    two_stage_case,
)
from sgl_eagle_kernels.bench.plan_cases import MOST_ROWS, plan_cases
from sgl_eagle_kernels.bench.tree_cases import grow_case, select_case
from sgl_eagle_kernels.lm_head import GlobalTop, LocalTop

SHAPES = ((49152, 576), (49152, 4096), (128256, 4096), (151936, 5120), (262144, 3840))
"""(vocabulary, hidden size)."""
ROWS = (1, 2, 4, 8, 16, 64)
RANKS = (256,)
TRIMMED = (32768, 16384)
"""Vocabularies of frequency-trimmed heads, by `d2t`."""
BATCH_SIZES = (1, 8, 64)
NUM_STEPS = 8
NUM_DRAFT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which cases to run.

    Attributes:
        shapes: (vocabulary, hidden size) of heads.
        rows: Rows of heads.
        ranks: Ranks of factors.
        plans: Instead of all routes, how the two-stage head of few rows may be cut.
    """

    shapes: Sequence[tuple[int, int]] = SHAPES
    rows: Sequence[int] = ROWS
    ranks: Sequence[int] = RANKS
    plans: bool = False


def make_cases(selection: Selection) -> Iterator[Case]:
    """All cases of a selection.

    Args:
        selection: Which.

    Yields:
        Heads first, then the tree operators.
    """
    if selection.plans:
        yield from _make_plan_cases(selection)
        return
    for num_tokens, hidden in selection.shapes:
        for rank in selection.ranks:
            yield read_case(num_tokens, hidden, rank)
        for num_rows in selection.rows:
            size = (num_tokens, hidden, num_rows)
            yield full_case(*size)
            yield our_full_case(*size)
            for kept in TRIMMED:
                if kept < num_tokens:
                    yield full_case(*size, kept=kept)
            yield cluster_case(*size)
            for rank in selection.ranks:
                yield from _factored_cases(*size, rank)
    for batch_size in BATCH_SIZES:
        yield grow_case(batch_size, topk=TOPK)
        yield select_case(
            batch_size, topk=TOPK, num_steps=NUM_STEPS, num_draft_tokens=NUM_DRAFT_TOKENS
        )


def _make_plan_cases(selection: Selection) -> Iterator[Case]:
    few_rows = [num_rows for num_rows in selection.rows if num_rows <= MOST_ROWS]
    for (num_tokens, hidden), num_rows, rank in product(
        selection.shapes, few_rows, selection.ranks
    ):
        yield from plan_cases(num_tokens, hidden, num_rows, rank)


def _factored_cases(num_tokens: int, hidden: int, num_rows: int, rank: int) -> Iterator[Case]:
    size = (num_tokens, hidden, num_rows, rank)
    tile_size = choose_tile_size(num_tokens)
    local = LocalTop(tile_size=tile_size, per_tile=1)
    yield low_rank_case(*size)
    yield two_stage_case(*size, local)
    yield two_stage_case(*size, LocalTop(tile_size=tile_size, per_tile=1, shuffle_seed=None))
    yield two_stage_case(*size, LocalTop(tile_size=2 * tile_size, per_tile=2))
    yield two_stage_case(*size, local, quantize=True)
    yield two_stage_case(*size, GlobalTop(num_candidates=CANDIDATES))
