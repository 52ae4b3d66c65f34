"""What the server runs without a policy file: the price rule, its estimates fitted beforehand.

The shipped prior was fitted on one small pair. It says how confidence relates to acceptance before
the server has seen its own text; from then on the server's own accepted and rejected nodes count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Literal

from sgl_eagle_harness.calibration import IsotonicMap
from sgl_eagle_harness.continuation import ContinuationModel
from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.errors import CalibrationError
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.policies.online_price import OnlinePricePolicy
from sgl_eagle_harness.policies.price import PricePolicy, PriceRules
from sgl_eagle_harness.policies.tier import TierConfig
from sgl_eagle_harness.records import Record, load_record
from sgl_eagle_harness.types import TreeLimits

SHIPPED_PRIOR = Path(str(files("sgl_eagle") / "assets" / "policy" / "prior.json"))

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
    """Stands in for the price rule until costs are known, and for good where they cannot be.

    It drafts EAGLE-2 trees at the limits, and asks for the verify sizes that the price rule will
    choose from.
    """

    @property
    def verify_sizes(self) -> tuple[int, ...]:
        """1, 2, 4, ... and the limit."""
        return builtin_sizes(self.limits)


def builtin_sizes(limits: TreeLimits) -> tuple[int, ...]:
    """Verify sizes that the price rule chooses from.

    Args:
        limits: Upper limits of the trees.

    Returns:
        Powers of two below the largest tree, and the largest tree.
    """
    largest = limits.num_draft_tokens
    return (*(2**power for power in range((largest - 1).bit_length())), largest)


def builtin_policy(
    limits: TreeLimits, costs: CostTable, prior: PolicyPrior, *, largest_batch: int
) -> OnlinePricePolicy:
    """The price rule at measured costs.

    Args:
        limits: Upper limits of the trees.
        costs: Measured on this server.
        prior: Where its estimates start.
        largest_batch: Requests that are decoded together at most.

    Returns:
        A policy that learns while it serves.
    """
    continuation = prior.continuation_for(limits.topk)
    topk = min(limits.topk, continuation.topk)
    policy = PricePolicy(
        num_steps=limits.num_steps,
        topk=topk,
        verify_sizes=builtin_sizes(limits),
        widths=(topk,),  # a draft step of the server runs all branches, whatever is asked for
        price_tok_per_us=0.0,  # OnlinePricePolicy solves it
        rules=PriceRules(adapt_width=False),
        tier=TierConfig(),
        calibration=prior.calibration,
        continuation=continuation,
        # A draft step knows the order of all branches' children, and of no fewer.
        costs=replace(costs, drafts_ahead=costs.drafts_ahead and topk == limits.topk),
        rows_share_rounds=True,
    )
    edges = tuple(2**power for power in range(largest_batch.bit_length()))
    longest = int(costs.target.context_len[-1])
    return OnlinePricePolicy(
        policy,
        typical_context=min(LARGEST_TYPICAL_CONTEXT, longest // 2 or 1),
        batch_edges=edges,
    )
