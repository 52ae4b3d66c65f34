"""Shapes of a round that a whole batch shares, what they cost, and which of them pays best.

Letters: D draft levels at most; S verify sizes; J shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sgl_eagle_harness.cost_table import CostGrid, CostTable
from sgl_eagle_harness.types import FloatArray, largest_tree_size


@dataclass(frozen=True, slots=True)
class RoundShape:
    """What every request of a batch does in one round.

    Attributes:
        num_steps: Levels drafted, that of the roots' children included; 0 decodes plainly.
        num_draft_tokens: Nodes verified, root included.
    """

    num_steps: int
    num_draft_tokens: int


PLAIN_ROUND = RoundShape(num_steps=0, num_draft_tokens=1)


def round_shapes(*, num_steps: int, topk: int, sizes: Sequence[int]) -> tuple[RoundShape, ...]:
    """Every shape that a plan may choose.

    Args:
        num_steps: Levels at most.
        topk: Children of every expanded node, and nodes expanded in one step.
        sizes: Verify sizes, root included, ascending.

    Returns:
        The plain round first, then every depth with every size that its tree can fill.
    """
    shapes = [PLAIN_ROUND]
    for depth in range(1, num_steps + 1):
        largest = largest_tree_size(num_steps=depth, topk=topk)
        shapes += [RoundShape(depth, size) for size in sizes if 1 < size <= largest]
    return tuple(shapes)


def shape_tokens(
    shapes: Sequence[RoundShape], expected_drafts: FloatArray, sizes: Sequence[int]
) -> FloatArray:
    """Expected tokens of one request in a round of each shape.

    Args:
        shapes: J shapes of at most D levels.
        expected_drafts: [D, S] float64, correct drafts of each depth and size.
        sizes: The S verify sizes.

    Returns:
        [J] float64, bonus token included.
    """
    column = {size: index for index, size in enumerate(sizes)}
    drafts = (
        expected_drafts[shape.num_steps - 1, column[shape.num_draft_tokens]]
        if shape.num_steps
        else 0.0
        for shape in shapes
    )
    return np.array([1.0 + correct for correct in drafts])


def shape_us(
    costs: CostTable,
    shapes: Sequence[RoundShape],
    *,
    topk: int,
    batch_size: int,
    context_len: float,
) -> FloatArray:
    """Time of a round of each shape; only an engine that does not draft ahead is asked in it.

    Args:
        costs: Measured latencies.
        shapes: J shapes.
        topk: Nodes expanded in one step.
        batch_size: Requests decoded together.
        context_len: Tokens before the roots.

    Returns:
        [J] float64 microseconds of the whole batch.

    Raises:
        CostTableRangeError: If the table does not reach a size, the batch or the context.
    """
    depths = np.array([shape.num_steps for shape in shapes])
    sizes = np.array([shape.num_draft_tokens for shape in shapes])
    waits = not costs.drafts_ahead
    level_us = (costs.draft_level_us if waits else costs.draft_step_us)(
        batch_size, topk, context_len
    )
    drafting_us = float(costs.draft_catch_up_us(batch_size, 1, context_len)) + float(level_us) * (
        depths - 1
    )
    if waits:
        drafting_us = drafting_us + costs.verify_select_us
    verify_us = costs.verify_us(batch_size, sizes, context_len)
    return np.asarray(verify_us + np.where(depths > 0, drafting_us, 0.0))


def shape_launch_us(
    launch: CostGrid, shapes: Sequence[RoundShape], *, batch_size: int, context_len: float
) -> FloatArray:
    """The host's own time of launching a round of each shape, whatever its depth.

    Args:
        launch: Of a cost table.
        shapes: J shapes.
        batch_size: Requests decoded together.
        context_len: Tokens before the roots.

    Returns:
        [J] float64 microseconds of the whole batch.

    Raises:
        CostTableRangeError: If the grid does not reach a size, the batch or the context.
    """
    sizes = np.array([shape.num_draft_tokens for shape in shapes])
    return launch.at(batch_size, sizes, context_len)


def choose_shape(tok_per_us: FloatArray, *, incumbent: int | None, margin: float) -> int:
    """The shape with the most tokens per second, unless the one that runs is nearly as good.

    Args:
        tok_per_us: [J] predicted tokens per microsecond.
        incumbent: Index of the shape that runs; None if none does.
        margin: Share by which another shape must be better before it replaces the one that runs.

    Returns:
        Index of the shape; the first among equals.
    """
    best = int(tok_per_us.argmax())
    if incumbent is not None and tok_per_us[incumbent] * (1 + margin) >= tok_per_us[best]:
        return incumbent
    return best
