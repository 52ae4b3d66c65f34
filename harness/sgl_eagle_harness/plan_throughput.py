"""Throughput of fixed plans on the average tree: what the price of time starts from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_eagle_harness.continuation import ContinuationModel
from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.root_forecast import forecast_from_root


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanThroughput:
    """Tokens per microsecond of a whole batch, by the cost table and the average tree.

    Attributes:
        plain_tok_per_us: Decoding plainly.
        best_tok_per_us: The best of plain decoding and every fixed depth and verify size.
    """

    plain_tok_per_us: float
    best_tok_per_us: float


def plan_throughput(
    costs: CostTable,
    continuation: ContinuationModel,
    *,
    num_steps: int,
    topk: int,
    sizes: tuple[int, ...],
    batch_size: int,
    context_len: int,
) -> PlanThroughput:
    """Compare plain decoding with every fixed depth and verify size.

    The best throughput is where the price of time is at home: maximising `tokens - price * time`
    over the same plans at that price gives zero, Dinkelbach's condition. A policy that adapts does
    better than any fixed plan, so it is a lower bound of its own fixed point.

    Args:
        costs: Measured latencies.
        continuation: Forecast of the average tree, for at least `topk` children.
        num_steps: Draft levels at most.
        topk: Children of every expanded node, and nodes expanded in one step.
        sizes: Verify sizes, root included, ascending.
        batch_size: Requests decoded together.
        context_len: Tokens before the roots.

    Returns:
        Both throughputs.

    Raises:
        CostTableRangeError: If the table does not reach a size, the batch or the context.
    """
    counts = np.array(sizes)
    drafts = forecast_from_root(
        continuation, num_steps=num_steps, topk=topk, width=topk, sizes=counts
    )
    further_levels = np.arange(num_steps)[:, None]
    stops = further_levels < num_steps - 1
    step_us = (
        float(costs.draft_catch_up_us(batch_size, 1, context_len))
        + costs.verify_select_us
        + further_levels * float(costs.draft_level_us(batch_size, topk, context_len))
        + stops * float(costs.stop_us(batch_size, context_len))
        + costs.verify_us(batch_size, counts, context_len)
    )
    plain = batch_size / float(costs.decode_us(batch_size, context_len))
    best = float((batch_size * (1 + drafts) / step_us).max())
    return PlanThroughput(plain_tok_per_us=plain, best_tok_per_us=max(plain, best))
