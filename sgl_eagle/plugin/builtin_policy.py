"""What the server runs without a policy file: the price of time, its estimates fitted beforehand.

The price settles every level where asking about it is worth its time, else a plan settles each
batch size. The shipped prior was fitted on one small pair. It says how confidence relates to
acceptance before the server has seen its own text; from then on the server's own accepted and
rejected nodes count.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

import numpy as np

from sgl_eagle_harness.calibration import IsotonicMap
from sgl_eagle_harness.continuation import ContinuationModel
from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.errors import CalibrationError
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.policies.online_plan import OnlinePlanPolicy
from sgl_eagle_harness.policies.online_price import OnlinePricePolicy
from sgl_eagle_harness.policies.plan import PlanPolicy, asking_gain
from sgl_eagle_harness.policies.price import PricePolicy, PriceRules
from sgl_eagle_harness.policies.tier import TierConfig
from sgl_eagle_harness.records import Record, load_record
from sgl_eagle_harness.root_forecast import forecast_from_root
from sgl_eagle_harness.types import FloatArray, TreeLimits

SHIPPED_PRIOR = Path(str(files("sgl_eagle") / "assets" / "policy" / "prior.json"))

LEAST_ASKING_GAIN = 0.03
"""Share of the tokens per second of a plan that asking after every draft step must be predicted to
gain: its decisions may cost 1 % of a round where they bring 4 %. A serving process has cold caches
and other threads, in which decisions take longer than they do at the start: on an H200 0.7 ms where
0.4 ms had been measured (2026-11-30, SGLang 0.5.17)."""

LARGEST_TYPICAL_CONTEXT = 1024
"""The price depends little on the context, and most requests are short."""


class PolicyPrior(Record):
    """What is known about drafts before any were seen.

    Attributes:
        schema_version: Version of this layout.
        target: Name of the target it was fitted on.
        draft: Name of the draft.
        num_positions: Positions fitted on.
        workloads: Their workloads.
        command: What made the file.
        calibration: From path confidence to acceptance probability.
        continuations: Forecasts of the next level, one for each topk, ascending.
    """

    schema_version: Literal[1] = 1
    target: str
    draft: str
    num_positions: int
    workloads: tuple[str, ...]
    command: str
    calibration: IsotonicMap
    continuations: tuple[ContinuationModel, ...]

    def continuation_for(self, topk: int) -> ContinuationModel:
        """The forecast of trees of some branching.

        Args:
            topk: Children of every expanded node.

        Returns:
            The narrowest forecast for at least so many, else the widest.
        """
        return next(
            (model for model in self.continuations if model.topk >= topk), self.continuations[-1]
        )


def load_prior(path: Path = SHIPPED_PRIOR) -> PolicyPrior:
    """Read a prior.

    Args:
        path: JSON file; the default ships with the package.

    Returns:
        The checked record.

    Raises:
        CalibrationError: If the file cannot be used; names file and field.
    """
    return load_record(path, PolicyPrior, CalibrationError, schema_version=1)


@dataclass(frozen=True, kw_only=True)
class UnmeasuredPolicy(Eagle2Policy):
    """Stands in for the server's own policy until costs are known, and for good if they cannot be.

    It drafts EAGLE-2 trees at the limits, and asks for the verify sizes that the server's own
    policy will choose from.
    """

    @property
    def verify_sizes(self) -> tuple[int, ...]:
        """1, 2, 4, ... and the limit."""
        return builtin_sizes(self.limits)


def builtin_sizes(limits: TreeLimits) -> tuple[int, ...]:
    """Verify sizes that the server's own policy chooses from.

    Args:
        limits: Upper limits of the trees.

    Returns:
        Powers of two below the largest tree, and the largest tree.
    """
    largest = limits.num_draft_tokens
    return (*(2**power for power in range((largest - 1).bit_length())), largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinChoice:
    """The server's own policy, and what it was chosen by.

    Attributes:
        policy: Learns while it serves; is asked after every draft step if that pays.
        context_len: Context at which it was settled.
        asking_gain: What being asked is worth to a single request, as a share of the tokens per
            second of a plan; below `LEAST_ASKING_GAIN` a plan serves.
    """

    policy: OnlinePlanPolicy | OnlinePricePolicy
    context_len: int
    asking_gain: float


def choose_builtin(
    limits: TreeLimits, costs: CostTable, prior: PolicyPrior, *, largest_batch: int
) -> BuiltinChoice:
    """The server's own policy at measured costs.

    One request settles whether it is asked after every draft step. A larger batch gains less from
    that, since its requests share depth and verify size, and pays more.

    Args:
        limits: Upper limits of the trees.
        costs: Measured on this server.
        prior: Where its estimates start.
        largest_batch: Requests that are decoded together at most.

    Returns:
        A price policy or a plan.
    """
    plan, context_len = builtin_plan(limits, costs, prior), typical_context(costs)
    gain = asking_gain(plan, batch_size=1, context_len=context_len)
    edges = tuple(2**power for power in range(largest_batch.bit_length()))
    policy: OnlinePlanPolicy | OnlinePricePolicy
    if gain >= LEAST_ASKING_GAIN:
        policy = OnlinePricePolicy(
            _builtin_price(plan, prior), typical_context=context_len, batch_edges=edges
        )
    else:
        policy = OnlinePlanPolicy(plan, prior.calibration, batch_edges=edges)
    return BuiltinChoice(policy=policy, context_len=context_len, asking_gain=gain)


def _builtin_price(plan: PlanPolicy, prior: PolicyPrior) -> PricePolicy:
    # The plan's trees, asked after every draft step.
    topk = plan.topk
    return PricePolicy(
        num_steps=plan.num_steps,
        topk=topk,
        verify_sizes=plan.verify_sizes,
        widths=(topk,),  # a draft step of the server runs all branches, whatever is asked for
        price_tok_per_us=0.0,  # OnlinePricePolicy solves it
        rules=PriceRules(adapt_width=False),
        tier=TierConfig(),
        calibration=prior.calibration,
        continuation=prior.continuation_for(topk),
        costs=plan.costs,
        rows_share_rounds=True,
    )


def builtin_plan(limits: TreeLimits, costs: CostTable, prior: PolicyPrior) -> PlanPolicy:
    """The plan that the prior's average tree leads to.

    Args:
        limits: Upper limits of the trees.
        costs: Measured on this server.
        prior: What is known about drafts.

    Returns:
        A plan of at most so many children a node as the prior knows.
    """
    return PlanPolicy(
        num_steps=limits.num_steps,
        topk=_known_topk(limits, prior),
        verify_sizes=builtin_sizes(limits),
        expected_drafts=tuple(map(tuple, expected_drafts(prior, limits).tolist())),
        costs=costs,
    )


def expected_drafts(prior: PolicyPrior, limits: TreeLimits) -> FloatArray:
    """Correct drafts of the prior's average tree.

    Args:
        prior: What is known about drafts.
        limits: Upper limits of the trees.

    Returns:
        [D, S] float64, for each number of levels and each of `builtin_sizes`; at most as many
        drafts as levels.
    """
    topk = _known_topk(limits, prior)
    drafts = forecast_from_root(
        prior.continuation_for(limits.topk),
        num_steps=limits.num_steps,
        topk=topk,
        width=topk,
        sizes=np.array(builtin_sizes(limits)),
    )
    return np.asarray(np.minimum(drafts, np.arange(1, limits.num_steps + 1)[:, None]))


def _known_topk(limits: TreeLimits, prior: PolicyPrior) -> int:
    return min(limits.topk, prior.continuation_for(limits.topk).topk)


def typical_context(costs: CostTable) -> int:
    """The context at which a server settles what it settles once.

    Args:
        costs: Measured on it.

    Returns:
        Tokens before the roots.
    """
    longest = int(costs.target.context_len[-1])
    return min(LARGEST_TYPICAL_CONTEXT, longest // 2 or 1)
