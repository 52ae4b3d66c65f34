"""How long the policy itself takes: a decision after a draft step, a choice of what to verify."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from sgl_eagle_harness.calibration import IdentityMap
from sgl_eagle_harness.continuation import PROB_EDGES, ContinuationModel
from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.draft_loop import verify_tree as select_tree
from sgl_eagle_harness.policies.price import PricePolicy, PriceRules
from sgl_eagle_harness.policies.tier import TierConfig
from sgl_eagle_harness.types import BatchContext, Children, IntArray

NUM_STEPS = 6
LARGEST_TREE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionTimes:
    """Medians in microseconds, for one request.

    Attributes:
        decide_us: Growing the tree by one level and deciding whether and how wide to go on.
        verify_select_us: Choosing and laying out the tree that is verified.
    """

    decide_us: float
    verify_select_us: float


def with_decision_times(table: CostTable, *, num_repeats: int = 100, seed: int = 0) -> CostTable:
    """Time the price rule, whose decisions are the dearest, on random drafts.

    Args:
        table: Costs that the policy looks up; its own decision times are ignored.
        num_repeats: Trees behind the medians.
        seed: Of the drafts.

    Returns:
        The table with both times filled in.
    """
    topk = int(table.draft.num_tokens[-1])
    policy = _never_stopping_policy(table, topk)
    batch = BatchContext(
        batch_size=int(table.target.batch_size[0]),
        context_len=table.target.context_len[:1],
        num_pending=np.ones(1, np.int64),
    )
    rng = np.random.default_rng(seed)
    levels, selections = [], []
    for _ in range(num_repeats):
        started = time.perf_counter()
        drafter = _RandomDrafter(rng)
        trees = grow_trees(drafter, policy, batch)
        grown = time.perf_counter()
        select_tree(trees, 0, policy.select_verify(trees, batch)[0], 0)
        selected = time.perf_counter()
        levels.append((grown - started - drafter.seconds) / trees.depth)
        selections.append(selected - grown)
    return replace(
        table,
        decide_us=float(np.median(levels)) * 1e6,
        verify_select_us=float(np.median(selections)) * 1e6,
    )


def _never_stopping_policy(table: CostTable, topk: int) -> PricePolicy:
    # At a price of almost nothing every level pays, so every decision is taken.
    sizes = tuple(int(size) for size in table.target.num_tokens if size <= LARGEST_TREE)
    even = tuple(tuple(1.0 / topk for _ in range(topk)) for _ in range(len(PROB_EDGES) + 1))
    return PricePolicy(
        num_steps=NUM_STEPS,
        topk=topk,
        verify_sizes=sizes,
        widths=tuple(int(width) for width in table.draft.num_tokens if width <= topk),
        price_tok_per_us=1e-12,
        rules=PriceRules(),
        tier=TierConfig(),
        calibration=IdentityMap(),
        continuation=ContinuationModel(prob_edges=PROB_EDGES, ratios=(even,)),
        costs=table,
    )


class _RandomDrafter:
    """Children with random probabilities; keeps account of its own time."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self.seconds = 0.0

    def expand_root(self, topk: int) -> Children:
        return self._children(np.zeros((1, 1), np.int64), topk)

    def expand(self, handles: IntArray, topk: int) -> Children:
        return self._children(handles, topk)

    def _children(self, handles: IntArray, topk: int) -> Children:
        started = time.perf_counter()
        shape = (*handles.shape, topk)
        shares = self._rng.dirichlet(np.full(topk + 1, 0.5), handles.shape)[..., :topk]
        children = Children(
            tokens=np.zeros(shape, np.int64),
            log_probs=np.log(-np.sort(-shares, axis=-1) + 1e-9).astype(np.float32),
            handles=np.broadcast_to(np.arange(shape[1] * topk).reshape(shape[1:]), shape),
            valid=np.broadcast_to(handles[..., None] >= 0, shape),
        )
        self.seconds += time.perf_counter() - started
        return children
