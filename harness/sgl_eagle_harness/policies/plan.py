"""A plan for each batch size: which round pays best there, from costs and an average tree.

Where asking after every draft step costs more than the drafts that it saves, depth and verify size
are settled before the round, from the batch size and the context alone. The tree itself is
EAGLE-2's, which needs no decision, so that an engine can draft and lay it out without waiting.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.errors import PolicyConfigError
from sgl_eagle_harness.policies.confidence_order import ConfidenceOrder
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.policies.measured_choices import check_draft_widths, check_verify_sizes
from sgl_eagle_harness.policies.plain import PlainPolicy
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.policies.tier import TierConfig
from sgl_eagle_harness.records import Record
from sgl_eagle_harness.round_shape import (
    RoundShape,
    choose_shape,
    round_shapes,
    shape_launch_us,
    shape_tokens,
    shape_us,
)
from sgl_eagle_harness.tree_build import select_rerank
from sgl_eagle_harness.types import (
    NO_NODE,
    BatchContext,
    BoolArray,
    CandidateTrees,
    FloatArray,
    IntArray,
    TreeLimits,
)

ExpectedDrafts = tuple[tuple[float, ...], ...]
"""[D][S] expected correct drafts after each number of levels, by verify size."""

ADAPTIVE_GAIN = 0.04
"""What asking after every level is worth, its own time left out: tuned price policies against the
best static setting of each workload, one request at a time, gained 4 % (2 to 7) on two cores of an
Intel Xeon (2026-11-30, reports/tuning/2026-11-30-xeon-2core-demo.json)."""

UNDAMPED = TierConfig(margin_tok=0.0, min_dwell_steps=1)
"""A plan follows from batch size and context, so that nothing in it flaps by itself."""


@dataclass(frozen=True, kw_only=True)
class PlanPolicy:
    """The round with the most tokens per second at each batch size and context.

    Contexts that share a power of two share a plan, made for the middle between that power and the
    next, so that an engine looks most rounds up.

    Attributes:
        num_steps: Draft levels at most.
        topk: Children of every expanded node, and nodes expanded in one step.
        verify_sizes: Sizes the target may verify, root included, ascending from 1.
        expected_drafts: Expected correct drafts of the average tree, `num_steps` rows, one column
            for each verify size.
        costs: Measured latencies.
        limits: Depth, branching and the largest verify size; derived.
        shapes: All shapes that it chooses among; derived.
    """

    num_steps: int
    topk: int
    verify_sizes: tuple[int, ...]
    expected_drafts: ExpectedDrafts
    costs: CostTable
    limits: TreeLimits = field(init=False)
    shapes: tuple[RoundShape, ...] = field(init=False, repr=False, compare=False)
    _tokens: FloatArray = field(init=False, repr=False, compare=False)
    _us: dict[tuple[int, float], FloatArray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _launch_us: dict[tuple[int, float], FloatArray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _best: dict[tuple[int, float], RoundShape] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _contexts: tuple[float, float] = field(init=False, repr=False, compare=False)
    _widest: Eagle2Policy = field(init=False, repr=False, compare=False)
    _memo_key: object = field(default_factory=object, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_parameters(self)
        limits = TreeLimits(
            num_steps=self.num_steps, topk=self.topk, num_draft_tokens=self.verify_sizes[-1]
        )
        shapes = round_shapes(num_steps=self.num_steps, topk=self.topk, sizes=self.verify_sizes)
        contexts = self.costs.target.context_len
        tokens = shape_tokens(shapes, np.array(self.expected_drafts), self.verify_sizes)
        for name, value in {
            "limits": limits,
            "shapes": shapes,
            "_tokens": tokens,
            "_contexts": (float(contexts[0]), float(contexts[-1])),
            "_widest": Eagle2Policy(limits=limits),
        }.items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """E.g. "plan-5-4-16": num_steps, topk, largest verify size."""
        return f"plan-{self.num_steps}-{self.topk}-{self.verify_sizes[-1]}"

    @property
    def confidence_order(self) -> ConfidenceOrder:
        """The most confident nodes first; for how many levels depends on the batch."""
        return ConfidenceOrder(num_certain_steps=0)

    @property
    def tier(self) -> TierConfig:
        """None: the same batch size and context always get the same tier."""
        return UNDAMPED

    @property
    def shape_tokens(self) -> FloatArray:
        """[J] float64 expected tokens of one request in a round, in the order of `shapes`."""
        return self._tokens

    def shape_tok_per_us(self, batch_size: int, context_len: float) -> FloatArray:
        """Predicted throughput of every shape.

        Args:
            batch_size: Requests decoded together.
            context_len: Tokens before the roots.

        Returns:
            [J] float64 tokens per microsecond of the whole batch, in the order of `shapes`.

        Raises:
            CostTableRangeError: If the cost table does not reach the batch or the context.
        """
        return np.asarray(batch_size * self._tokens / self.shape_us(batch_size, context_len))

    def shape_us(self, batch_size: int, context_len: float) -> FloatArray:
        """Predicted time of a round of every shape.

        Args:
            batch_size: Requests decoded together.
            context_len: Tokens before the roots.

        Returns:
            [J] float64 microseconds, in the order of `shapes`; do not change it.

        Raises:
            CostTableRangeError: If the cost table does not reach the batch or the context.
        """
        key = (batch_size, self.planned_context(context_len))
        us = self._us.get(key)
        if us is None:
            us = shape_us(
                self.costs, self.shapes, topk=self.topk, batch_size=key[0], context_len=key[1]
            )
            self._us[key] = us
        return us

    def shape_launch_us(self, batch_size: int, context_len: float) -> FloatArray:
        """The host's own share of a round of every shape, which a device may hide.

        Args:
            batch_size: Requests decoded together.
            context_len: Tokens before the roots.

        Returns:
            [J] float64 microseconds, in the order of `shapes`; do not change it. All of `shape_us`
            where the cost table does not tell them apart.

        Raises:
            CostTableRangeError: If the cost table does not reach the batch or the context.
        """
        if self.costs.launch is None:
            return self.shape_us(batch_size, context_len)
        key = (batch_size, self.planned_context(context_len))
        us = self._launch_us.get(key)
        if us is None:
            us = shape_launch_us(
                self.costs.launch, self.shapes, batch_size=key[0], context_len=key[1]
            )
            self._launch_us[key] = us
        return us

    def planned_context(self, context_len: float) -> float:
        """The context that stands for all that share its plan.

        Args:
            context_len: Tokens before the roots.

        Returns:
            The middle between two powers of two, within what was measured.
        """
        shortest, longest = self._contexts
        if not shortest <= context_len <= longest:
            return context_len  # the cost table refuses it
        middle = 0.75 * 2.0 ** int(context_len).bit_length()
        return min(max(middle, shortest), longest)

    def round_shape(self, batch_size: int, context_len: float) -> RoundShape:
        """The round of a batch whose requests share it.

        Args:
            batch_size: Requests decoded together.
            context_len: Tokens before their roots, on average.

        Returns:
            The shape with the most tokens per second.
        """
        key = (batch_size, self.planned_context(context_len))
        best = self._best.get(key)
        if best is None:
            speed = self.shape_tok_per_us(*key)
            best = self.shapes[choose_shape(speed, incumbent=None, margin=0.0)]
            self._best[key] = best
        return best

    def with_expected_drafts(self, drafts: FloatArray) -> PlanPolicy:
        """The same plan of other yields; what was looked up in the cost table stays known.

        Args:
            drafts: [D, S] float64 expected correct drafts.

        Returns:
            A new plan.

        Raises:
            PolicyConfigError: If they have another shape or are out of range.
        """
        plan = replace(self, expected_drafts=tuple(map(tuple, drafts.tolist())))
        for known in ("_us", "_launch_us"):
            object.__setattr__(plan, known, getattr(self, known))
        return plan

    def policy_of(self, shape: RoundShape) -> SpecPolicy:
        """The policy of rounds of one shape.

        Args:
            shape: One of `shapes`.

        Returns:
            EAGLE-2 trees of that depth and size, or plain decoding.
        """
        return _policy_of(shape, self.topk)

    def should_speculate(self, batch: BatchContext) -> BoolArray:
        """Whether drafting pays, each row by its own context.

        Args:
            batch: B rows.

        Returns:
            [B] bool.
        """
        return self._row_shapes(batch)[0] > 0

    def tier_values(self, batch: BatchContext) -> tuple[FloatArray, FloatArray]:
        """Value of one step in each tier at the price of the best round, each row by its context.

        Args:
            batch: B rows.

        Returns:
            [B] float64 value of the best speculative round and [B] float64 value of the plain one,
            in tokens; the higher is 0.
        """
        contexts, places = np.unique(batch.context_len, return_inverse=True)
        values = np.empty((2, len(contexts)))
        for index, context_len in enumerate(contexts.tolist()):
            speed = self.shape_tok_per_us(batch.batch_size, context_len)
            us = self.shape_us(batch.batch_size, context_len)
            net = self._tokens - speed.max() * us / batch.batch_size
            values[:, index] = net[1:].max(), net[0]
        return values[0, places], values[1, places]

    def select_frontier(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:
        """EAGLE-2's frontier in rows that are planned to go deeper.

        Args:
            trees: All nodes so far.
            batch: B rows.

        Returns:
            [B, topk] int64 columns, best first, `NO_NODE` where a row ends or has fewer.
        """
        frontier = self._widest.select_frontier(trees, batch)
        goes_on = self._row_shapes(batch)[0] > trees.depth
        return np.where(goes_on[:, None], frontier, NO_NODE)

    def select_verify(self, trees: CandidateTrees, batch: BatchContext) -> IntArray:
        """As many of the most confident nodes as each row's plan verifies.

        Args:
            trees: The finished trees.
            batch: B rows.

        Returns:
            [B, M] int64 columns, ascending, padded with `NO_NODE`.
        """
        num_nodes = self._row_shapes(batch)[1] - 1
        return select_rerank(trees.path_log_confidence, trees.valid, num_nodes)

    def _row_shapes(self, batch: BatchContext) -> tuple[IntArray, IntArray]:
        # [B] levels and [B] nodes verified.
        found: tuple[IntArray, IntArray] | None = batch.memo.get(self._memo_key)
        if found is None:
            contexts, places = np.unique(batch.context_len, return_inverse=True)
            shapes = [self.round_shape(batch.batch_size, float(each)) for each in contexts]
            depths = np.array([shape.num_steps for shape in shapes], np.int64)
            sizes = np.array([shape.num_draft_tokens for shape in shapes], np.int64)
            found = depths[places], sizes[places]
            batch.memo[self._memo_key] = found
        return found


@lru_cache
def _policy_of(shape: RoundShape, topk: int) -> SpecPolicy:
    if not shape.num_steps:
        return PlainPolicy()
    limits = TreeLimits(
        num_steps=shape.num_steps, topk=topk, num_draft_tokens=shape.num_draft_tokens
    )
    return Eagle2Policy(limits=limits)


def asking_gain(plan: PlanPolicy, *, batch_size: int, context_len: float) -> float:
    """What a policy that is asked after every level would gain over a plan.

    It is charged what the cost table says of decisions and of stopping, no decision hidden behind
    a draft step; what it brings is taken from elsewhere, `ADAPTIVE_GAIN`.

    Args:
        plan: The plan.
        batch_size: Requests decoded together.
        context_len: Tokens before the roots.

    Returns:
        Share of the plan's tokens per second; negative where asking costs more than it brings.

    Raises:
        CostTableRangeError: If the cost table does not reach the batch or the context.
    """
    planned = plan.shape_tok_per_us(batch_size, context_len)
    us, context_len = plan.shape_us(batch_size, context_len), plan.planned_context(context_len)
    waiting = replace(plan.costs, drafts_ahead=False)
    asked_us = shape_us(
        waiting, plan.shapes, topk=plan.topk, batch_size=batch_size, context_len=context_len
    )
    asked_us[1:] += plan.costs.stop_us(batch_size, context_len)  # the first is the plain round
    asked = planned * us / asked_us
    asked[1:] *= 1 + ADAPTIVE_GAIN
    return float(asked.max() / planned.max() - 1)


class PlanSpec(Record):
    """Stored form of `PlanPolicy`, without the cost table.

    Attributes:
        kind: Tag of the record.
        num_steps: Draft levels at most.
        topk: Children of every expanded node, and nodes expanded in one step.
        verify_sizes: Sizes the target may verify, root included, ascending from 1.
        expected_drafts: Expected correct drafts, a row for each number of levels, a column for each
            verify size.
    """

    kind: Literal["plan"] = "plan"
    num_steps: int
    topk: int
    verify_sizes: tuple[int, ...]
    expected_drafts: ExpectedDrafts

    def build(self, cost_table: CostTable | None) -> PlanPolicy:
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
            raise PolicyConfigError("a plan needs a cost table, got cost_table=None")
        return PlanPolicy(
            num_steps=self.num_steps,
            topk=self.topk,
            verify_sizes=self.verify_sizes,
            expected_drafts=self.expected_drafts,
            costs=cost_table,
        )


def _check_parameters(policy: PlanPolicy) -> None:
    sizes = policy.verify_sizes
    check_verify_sizes(sizes, policy.costs)
    check_draft_widths("topk", 1, policy.topk, policy.costs)
    rows = policy.expected_drafts
    if len(rows) != policy.num_steps or {len(row) for row in rows} != {len(sizes)}:
        raise PolicyConfigError(
            f"expected_drafts must be {policy.num_steps} rows (num_steps) of {len(sizes)} numbers "
            f"(verify_sizes), got rows of {[len(row) for row in rows]}"
        )
    for depth, row in enumerate(rows, 1):
        if not all(0 <= drafts <= depth for drafts in row):
            raise PolicyConfigError(
                f"expected_drafts after {depth} levels must be in [0, {depth}], got {list(row)}"
            )
