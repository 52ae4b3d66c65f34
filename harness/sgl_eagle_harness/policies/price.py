"""The price rule: every local decision maximises expected tokens less the price of their time.

Source: Dinkelbach's transform of tokens per second; `harness/README.md` derives it.

A batch of R requests shares the time of a step, so each row pays one R-th of it. Rows decide for
themselves, and none waits for another: sizes are per request, unless the engine drafts and verifies
all of a batch alike (`rows_share_rounds`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from pydantic import Field

from sgl_eagle_harness.calibration import Calibration, CalibrationSpec
from sgl_eagle_harness.continuation import ContinuationModel, forecast_children
from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.early_stop import choose_width, forecast_gain, merge_best, size_values
from sgl_eagle_harness.errors import PolicyConfigError
from sgl_eagle_harness.policies.confidence_order import ConfidenceOrder
from sgl_eagle_harness.policies.measured_choices import check_draft_widths, check_verify_sizes
from sgl_eagle_harness.policies.tier import TierConfig
from sgl_eagle_harness.records import Record
from sgl_eagle_harness.root_forecast import forecast_from_root
from sgl_eagle_harness.tree_build import (
    at_columns,
    keep_columns,
    rank_log_scores,
    rank_probs,
    take_best,
)
from sgl_eagle_harness.types import (
    NO_NODE,
    BatchContext,
    BoolArray,
    CandidateTrees,
    Float32Array,
    FloatArray,
    IntArray,
    TreeLimits,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceRules:
    """Which decisions the price settles; the others keep EAGLE-2's fixed choice.

    Attributes:
        prune: Choose the verify size; off verifies the largest.
        stop: End drafting early; off drafts all levels.
        adapt_width: Choose the frontier's width; off expands the widest.
        allow_plain: Decode plainly where speculation is worth less; off always speculates.
    """

    prune: bool = True
    stop: bool = True
    adapt_width: bool = True
    allow_plain: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """Nodes of some trees, mapped and ranked.

    Attributes:
        probs: [B, N] float64 accept probabilities.
        best: [B, J] float32, the highest of them, falling.
    """

    probs: FloatArray
    best: Float32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prices:
    """Prices of one step, in tokens; looked up once, asked for after every level.

    Attributes:
        verify: [B, S] float64, of verifying each size.
        draft: [B, C] float64, of one more draft step at each width, its decision included.
    """

    verify: FloatArray
    draft: FloatArray


@dataclass(frozen=True, kw_only=True)
class PricePolicy:
    """Prunes, stops, narrows and abstains by one price of time.

    Attributes:
        num_steps: Draft steps at most.
        topk: Children of every expanded node.
        verify_sizes: Sizes the target may verify, root included, ascending from 1.
        widths: Nodes that one draft step may expand, ascending, at most `topk`.
        price_tok_per_us: Tokens that one microsecond of the whole batch is worth.
        rules: Which decisions the price settles.
        forecast_scale: Factor on the forecast gain of a draft level; above 1 makes up for what a
            forecast by means, one level ahead, leaves out.
        tier: Damping of changes between speculation and plain decoding.
        calibration: From path confidence to acceptance probability.
        continuation: Forecast of the next level, for at least `topk` children.
        costs: Measured latencies.
        rows_share_rounds: Whether the rows are one batch of an engine that drafts for all of them
            at once and pads their trees to one verify size, so that they decide together. Rows of
            a replay are positions, and decide alone.
        limits: Depth, branching and the largest verify size; derived.
    """

    num_steps: int
    topk: int
    verify_sizes: tuple[int, ...]
    widths: tuple[int, ...]
    price_tok_per_us: float
    rules: PriceRules
    tier: TierConfig
    calibration: Calibration
    continuation: ContinuationModel
    costs: CostTable
    forecast_scale: float = 1.0
    rows_share_rounds: bool = False
    limits: TreeLimits = field(init=False)
    _memo_key: object = field(default_factory=object, init=False, repr=False, compare=False)
    _sizes: IntArray = field(init=False, repr=False, compare=False)
    _widths: IntArray = field(init=False, repr=False, compare=False)
    _ratios: FloatArray = field(init=False, repr=False, compare=False)
    _edges: FloatArray = field(init=False, repr=False, compare=False)
    _prior: FloatArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_parameters(self)
        limits = TreeLimits(
            num_steps=self.num_steps, topk=self.topk, num_draft_tokens=self.verify_sizes[-1]
        )
        sizes = self.verify_sizes if self.rules.prune else self.verify_sizes[-1:]
        widths = self.widths if self.rules.adapt_width else self.widths[-1:]
        ratios = self.continuation.as_array()[:, :, : self.topk]
        for name, value in {
            "limits": limits,
            "_sizes": np.array(sizes),
            "_widths": np.array(widths),
            "_ratios": ratios,
            "_edges": np.array(self.continuation.prob_edges),
        }.items():
            object.__setattr__(self, name, value)
        prior = forecast_from_root(
            self.continuation,
            num_steps=self.num_steps,
            topk=self.topk,
            width=widths[-1],
            sizes=self._sizes,
        )
        object.__setattr__(self, "_prior", prior)

    @property
    def name(self) -> str:
        """E.g. "price-6-8-32": num_steps, topk, largest verify size."""
        return f"price-{self.num_steps}-{self.topk}-{self.verify_sizes[-1]}"

    @property
    def confidence_order(self) -> ConfidenceOrder:
        """The best paths are expanded first; how many is decided after every level."""
        decides = self.rules.stop or len(self._widths) > 1 or self._widths[0] < self.topk
        return ConfidenceOrder(num_certain_steps=0 if decides else self.num_steps - 1)

    def should_speculate(self, batch: BatchContext) -> BoolArray:
        """Whether speculating is worth more than decoding plainly, undamped.

        Args:
            batch: B rows.

        Returns:
            [B] bool.
        """
        speculate, plain = self.tier_values(batch)
        return np.asarray(speculate > plain)

    def tier_values(self, batch: BatchContext) -> tuple[FloatArray, FloatArray]:
        """Value of one step in each tier, before anything is drafted.

        The speculative value is that of the average tree, at its best depth and size.

        Args:
            batch: B rows.

        Returns:
            [B] float64 value of speculating and [B] float64 value of decoding plainly.
        """
        plain = 1 - self._share(batch) * self.costs.decode_us(batch.batch_size, batch.context_len)
        if not self.rules.allow_plain:
            return np.full(batch.num_rows, np.inf), plain
        spent = self.costs.draft_catch_up_us(batch.batch_size, batch.num_pending, batch.context_len)
        spent = spent + self.costs.verify_select_us
        prices = self._prices(batch)
        num_levels = np.arange(len(self._prior))
        values = (self._prior[None] - prices.verify[:, None, :]).max(axis=2)
        values = values - (self._share(batch) * spent[:, None] + num_levels * prices.draft[:, -1:])
        stop_us = self.costs.stop_us(batch.batch_size, batch.context_len)
        values[:, :-1] -= self._share(batch) * stop_us[:, None]
        best = values.max(axis=1) if self.rules.stop else values[:, -1]
        return 1 + best, plain

    def select_frontier(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:
        """The best nodes of the newest level, as many as pay for their draft step.

        Nodes rank by path confidence, which calibration keeps up to plateaus: recorded beams are
        in that order too, so a narrower beam lies within them.

        Args:
            trees: All nodes so far.
            batch: B rows.

        Returns:
            [B, W] int64 columns, best first, padded with `NO_NODE`.
        """
        scored = self._score(trees)
        level = trees.last_level
        alive = np.flatnonzero(trees.valid[:, level].any(axis=1))
        frontier = np.full((trees.num_rows, int(self._widths[-1])), NO_NODE)
        if not len(alive):
            return frontier[:, :0]
        rows: IntArray | slice = slice(None) if len(alive) == trees.num_rows else alive
        valid = trees.valid[rows, level]
        keys = rank_log_scores(trees.path_log_confidence[rows, level], valid)
        order = take_best(keys, int(self._widths[-1]))
        kept = at_columns(valid, order)
        probs = at_columns(scored.probs[rows, level], order)
        chosen = self._choose_widths(
            scored.best[rows], probs, trees.depth, self._prices(batch), rows
        )
        kept &= np.arange(order.shape[1]) < chosen[:, None]
        frontier = frontier[:, : order.shape[1]]
        frontier[rows] = np.where(kept, order + level.start, NO_NODE)
        return frontier[:, : int(chosen.max(initial=0))]

    def select_verify(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:
        """The best nodes of all levels, as many as pay for their verification.

        Args:
            trees: The finished trees.
            batch: B rows.

        Returns:
            [B, M] int64 columns, ascending, padded with `NO_NODE`.
        """
        if not trees.num_nodes:
            return np.empty((trees.num_rows, 0), np.int64)
        scored = self._score(trees)
        values = size_values(scored.best, self._sizes, self._prices(batch).verify)
        if self.rows_share_rounds:
            values = np.broadcast_to(values.sum(axis=0), values.shape)
        num_nodes = self._sizes[values.argmax(axis=1)] - 1
        order = take_best(rank_probs(scored.probs, trees.valid), int(num_nodes.max(initial=0)))
        kept = np.arange(order.shape[1]) < num_nodes[:, None]
        return keep_columns(order, kept & at_columns(trees.valid, order))

    def _score(self, trees: CandidateTrees) -> _Scored:
        before: _Scored | None = trees.prefix_memo.get(self._memo_key)
        if before is not None and before.probs.shape[1] == trees.num_nodes:
            return before
        probs = self.calibration.accept_probs(
            trees.path_log_confidence,
            trees.step_log_probs,
            trees.depths,
            trees.ranks,
            trees.parents,
            known=None if before is None else before.probs,
        )
        if before is None:
            best, start = np.empty((trees.num_rows, 0), np.float32), 0
        else:
            best, start = before.best, before.probs.shape[1]
        added = np.where(trees.valid[:, start:], probs[:, start:], 0.0).astype(np.float32)
        best = merge_best(best, added, int(self._sizes[-1]) - 1)
        scored = _Scored(probs=probs, best=best)
        trees.prefix_memo[self._memo_key] = scored
        return scored

    def _choose_widths(
        self,
        best: Float32Array,
        probs: FloatArray,
        depth: int,
        prices: _Prices,
        rows: IntArray | slice,
    ) -> IntArray:
        """Numbers of frontier nodes to expand.

        Args:
            best: [A, J] float32, falling probabilities of the trees that still grow.
            probs: [A, W] float64 probabilities of their frontiers, best path first.
            depth: Depth of the frontier.
            prices: Prices of all rows.
            rows: Which rows still grow.

        Returns:
            [A] int64, 0 stops.
        """
        if not self.rules.stop and len(self._widths) == 1:
            return np.full(len(best), self._widths[0])
        children = forecast_children(self._ratios, self._edges, depth, probs).astype(np.float32)
        gains = forecast_gain(best, children, self._widths, self._sizes, prices.verify[rows])
        gains = self.forecast_scale * gains
        if self.rows_share_rounds:
            total = np.maximum(gains, 0.0).sum(axis=0, keepdims=True)
            price = prices.draft.sum(axis=0, keepdims=True)
            chosen = choose_width(total, price, may_stop=self.rules.stop)
            width = np.where(chosen < 0, 0, self._widths[chosen])
            return np.where(gains.max(axis=1) > 0, width, 0) if self.rules.stop else width
        chosen = choose_width(gains, prices.draft[rows], may_stop=self.rules.stop)
        return np.where(chosen < 0, 0, self._widths[chosen])

    def _share(self, batch: BatchContext) -> float:
        return self.price_tok_per_us / batch.batch_size

    def _prices(self, batch: BatchContext) -> _Prices:
        prices: _Prices | None = batch.memo.get(self._memo_key)
        if prices is None:
            share, context_len = self._share(batch), batch.context_len[:, None]
            verify = self.costs.verify_us(batch.batch_size, self._sizes, context_len)
            level_us = self.costs.draft_level_us if self.rules.stop else self.costs.draft_step_us
            draft = level_us(batch.batch_size, self._widths, context_len)
            prices = _Prices(verify=share * verify, draft=share * draft)
            batch.memo[self._memo_key] = prices
        return prices


class PriceSpec(Record):
    """Stored form of `PricePolicy`, without the cost table.

    Attributes:
        kind: Tag of the record.
        num_steps: Draft steps at most.
        topk: Children of every expanded node.
        verify_sizes: Sizes the target may verify, root included, ascending from 1.
        widths: Nodes that one draft step may expand, ascending, at most `topk`.
        price_tok_per_us: Tokens that one microsecond of the whole batch is worth.
        prune: Choose the verify size.
        stop: End drafting early.
        adapt_width: Choose the frontier's width.
        allow_plain: Decode plainly where speculation is worth less.
        forecast_scale: Factor on the forecast gain of a draft level.
        tier: Damping of changes between speculation and plain decoding.
        calibration: From path confidence to acceptance probability.
        continuation: Forecast of the next level.
    """

    kind: Literal["price"] = "price"
    num_steps: int
    topk: int
    verify_sizes: tuple[int, ...]
    widths: tuple[int, ...]
    price_tok_per_us: float = Field(allow_inf_nan=False)
    prune: bool = True
    stop: bool = True
    adapt_width: bool = True
    allow_plain: bool = True
    forecast_scale: float = 1.0
    tier: TierConfig = TierConfig()
    calibration: CalibrationSpec
    continuation: ContinuationModel

    def build(self, cost_table: CostTable | None) -> PricePolicy:
        """Make the policy.

        Args:
            cost_table: Measured latencies.

        Returns:
            The policy.

        Raises:
            PolicyConfigError: If there is no cost table or a parameter is out of range.
            TreeLimitsError: If no tree satisfies num_steps, topk and the largest verify size.
        """
        if cost_table is None:
            raise PolicyConfigError("a price policy needs a cost table, got cost_table=None")
        return PricePolicy(
            num_steps=self.num_steps,
            topk=self.topk,
            verify_sizes=self.verify_sizes,
            widths=self.widths,
            price_tok_per_us=self.price_tok_per_us,
            rules=PriceRules(
                prune=self.prune,
                stop=self.stop,
                adapt_width=self.adapt_width,
                allow_plain=self.allow_plain,
            ),
            forecast_scale=self.forecast_scale,
            tier=self.tier,
            calibration=self.calibration,
            continuation=self.continuation,
            costs=cost_table,
        )


def _check_parameters(policy: PricePolicy) -> None:
    if not (np.isfinite(policy.price_tok_per_us) and policy.price_tok_per_us >= 0):
        raise PolicyConfigError(
            f"price_tok_per_us must be finite and at least 0, got {policy.price_tok_per_us}"
        )
    if not (np.isfinite(policy.forecast_scale) and policy.forecast_scale > 0):
        raise PolicyConfigError(
            f"forecast_scale must be finite and above 0, got {policy.forecast_scale}"
        )
    check_verify_sizes(policy.verify_sizes, policy.costs)
    widths = policy.widths
    if not widths or list(widths) != sorted(set(widths)) or widths[0] < 1:
        raise PolicyConfigError(f"widths must rise from at least 1, got {list(widths)}")
    if widths[-1] > policy.topk:
        raise PolicyConfigError(f"widths must be at most topk={policy.topk}, got {list(widths)}")
    if policy.continuation.topk < policy.topk:
        raise PolicyConfigError(
            f"continuation must forecast at least topk={policy.topk} children, got "
            f"{policy.continuation.topk}"
        )
    check_draft_widths("widths", widths[0], widths[-1], policy.costs)
