"""What the tuner may choose, as plain data, as Optuna parameters and as a policy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, Literal, Protocol, get_args

from sgl_eagle_harness.calibration import Calibration, CalibrationKind
from sgl_eagle_harness.calibration_fit import fit_calibration
from sgl_eagle_harness.continuation import ContinuationModel, fit_continuation
from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.errors import PolicyConfigError
from sgl_eagle_harness.policies.price import PriceSpec
from sgl_eagle_harness.types import TreeLimits, largest_tree_size

SizeSet = Literal["every", "sparse", "powers"]
"""Verify sizes on offer up to the largest: all; about 1.3 apart; powers of two. An engine with
captured graphs pays memory and start-up time for each."""

DRAFT_TOKEN_CHOICES = (4, 8, 12, 16, 24, 32, 48, 64)
PRICE_RATIO_RANGE = (0.4, 2.5)
SPARSE_STEP = 1.3
WIDTH_CHOICES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PricePoint:
    """One setting of the price policy.

    Attributes:
        num_steps: Draft steps at most.
        topk: Children of every expanded node.
        max_draft_tokens: Largest verify size, root included; cut to what the trees can hold.
        size_set: Which smaller sizes may be verified.
        calibration: Map from confidence to acceptance probability.
        price_ratio: Price of time over its fixed point.
        stop: Whether drafting may end early.
        adapt_width: Whether the frontier may be narrower than topk.
    """

    num_steps: int
    topk: int
    max_draft_tokens: int
    size_set: SizeSet
    calibration: CalibrationKind
    price_ratio: float
    stop: bool
    adapt_width: bool

    def params(self) -> dict[str, Any]:
        """The point as Optuna parameters.

        Returns:
            Parameter name to value.
        """
        return asdict(self)

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> PricePoint:
        """The point of a finished trial.

        Args:
            params: Parameter name to value.

        Returns:
            The point.
        """
        return cls(**params)


class Suggests(Protocol):
    """The part of an Optuna trial that a search space needs."""

    def suggest_int(self, name: str, low: int, high: int) -> int:
        """Choose an integer in [low, high]."""
        ...

    def suggest_float(self, name: str, low: float, high: float, *, log: bool) -> float:
        """Choose a number in [low, high], evenly in its logarithm if `log`."""
        ...

    def suggest_categorical(self, name: str, choices: tuple[Any, ...]) -> Any:  # noqa: ANN401
        """Choose one of the choices."""
        ...


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Ranges of all parameters; only what trace and cost table cover.

    Attributes:
        max_steps: Largest `num_steps`.
        topk: Choices of `topk`.
        max_draft_tokens: Choices of `max_draft_tokens`.
        size_sets: Choices of `size_set`.
        calibrations: Choices of `calibration`.
        price_ratio: Lowest and highest `price_ratio`, searched evenly in its logarithm.
    """

    max_steps: int
    topk: tuple[int, ...]
    max_draft_tokens: tuple[int, ...]
    size_sets: tuple[SizeSet, ...] = get_args(SizeSet)
    calibrations: tuple[CalibrationKind, ...] = get_args(CalibrationKind)
    price_ratio: tuple[float, float] = PRICE_RATIO_RANGE

    @classmethod
    def covered_by(cls, trace: DenseTrace, costs: CostTable) -> SearchSpace:
        """The largest space that a trace and a cost table cover.

        Args:
            trace: Dense trace.
            costs: Measured costs.

        Returns:
            The space.

        Raises:
            PolicyConfigError: If the cost table measured no verify size that a tree needs.
        """
        largest = int(costs.target.num_tokens[-1])
        widest = int(costs.draft.num_tokens[-1])
        sizes = tuple(size for size in DRAFT_TOKEN_CHOICES if size <= largest)
        topk = tuple(beam for beam in trace.header.beams if beam <= widest)
        if not sizes or not topk:
            raise PolicyConfigError(
                f"the cost table must reach {DRAFT_TOKEN_CHOICES[0]} verified tokens and "
                f"{trace.header.beams[0]} drafted nodes, got at most {largest} and {widest}"
            )
        return cls(max_steps=trace.header.num_steps, topk=topk, max_draft_tokens=sizes)

    def suggest(self, trial: Suggests) -> PricePoint:
        """Let a sampler choose a point.

        Args:
            trial: Optuna trial.

        Returns:
            The point.
        """
        low, high = self.price_ratio
        return PricePoint(
            num_steps=trial.suggest_int("num_steps", 1, self.max_steps),
            topk=trial.suggest_categorical("topk", self.topk),
            max_draft_tokens=trial.suggest_categorical("max_draft_tokens", self.max_draft_tokens),
            size_set=trial.suggest_categorical("size_set", self.size_sets),
            calibration=trial.suggest_categorical("calibration", self.calibrations),
            price_ratio=trial.suggest_float("price_ratio", low, high, log=True),
            stop=trial.suggest_categorical("stop", (True, False)),
            adapt_width=trial.suggest_categorical("adapt_width", (True, False)),
        )

    def widest_points(self) -> list[PricePoint]:
        """The price rule as theory has it: all room, price at its fixed point.

        Returns:
            One point per calibration, the last kind first.
        """
        return [
            PricePoint(
                num_steps=self.max_steps,
                topk=self.topk[-1],
                max_draft_tokens=self.max_draft_tokens[-1],
                size_set=self.size_sets[0],
                calibration=kind,
                price_ratio=1.0,
                stop=True,
                adapt_width=True,
            )
            for kind in reversed(self.calibrations)
        ]

    def points_within(self, limits: TreeLimits) -> list[PricePoint]:
        """The price rule inside the trees of a static setting.

        Args:
            limits: Of a setting that the space covers.

        Returns:
            With all rules, and with pruning alone, which differs least from the static setting.
        """
        large_enough = [s for s in self.max_draft_tokens if s >= limits.num_draft_tokens]
        point = replace(
            self.widest_points()[0],
            num_steps=limits.num_steps,
            topk=limits.topk,
            max_draft_tokens=large_enough[0] if large_enough else self.max_draft_tokens[-1],
        )
        return [point, replace(point, stop=False, adapt_width=False)]


@dataclass(frozen=True, kw_only=True)
class PointBuilder:
    """Turns points into policies, with maps fitted on the tuning prompts.

    Attributes:
        trace: Tuning prompts.
        costs: Measured costs, whose range bounds sizes and widths.
    """

    trace: DenseTrace
    costs: CostTable
    _fitted: dict[tuple[str, int], tuple[Calibration, ContinuationModel]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def build(self, point: PricePoint, fixed_price: float) -> PriceSpec:
        """Make the policy of a point.

        Args:
            point: The setting.
            fixed_price: Price of time at its fixed point, tokens per microsecond.

        Returns:
            Stored form of the policy.
        """
        calibration, continuation = self._fit(point.calibration, point.topk)
        room = largest_tree_size(num_steps=point.num_steps, topk=point.topk)
        return PriceSpec(
            num_steps=point.num_steps,
            topk=point.topk,
            verify_sizes=verify_sizes(point.size_set, min(point.max_draft_tokens, room)),
            widths=tuple(width for width in WIDTH_CHOICES if width <= point.topk),
            price_tok_per_us=fixed_price * point.price_ratio,
            stop=point.stop,
            adapt_width=point.adapt_width,
            calibration=calibration,
            continuation=continuation,
        )

    def _fit(self, kind: CalibrationKind, topk: int) -> tuple[Calibration, ContinuationModel]:
        if (kind, topk) not in self._fitted:
            limits = TreeLimits(
                num_steps=self.trace.header.num_steps, topk=topk, num_draft_tokens=2
            )
            calibration = fit_calibration(kind, self.trace, limits)
            continuation = fit_continuation(self.trace, calibration, limits)
            self._fitted[kind, topk] = (calibration, continuation)
        return self._fitted[kind, topk]


@cache
def verify_sizes(size_set: SizeSet, largest: int) -> tuple[int, ...]:
    """Sizes on offer.

    Args:
        size_set: Which.
        largest: Largest size, at least 2.

    Returns:
        Ascending from 1 to `largest`.
    """
    if size_set == "every":
        return tuple(range(1, largest + 1))
    step = SPARSE_STEP if size_set == "sparse" else 2.0
    grown = itertools.accumulate(
        itertools.repeat(step), lambda size, factor: max(size + 1, round(size * factor)), initial=1
    )
    return (*itertools.takewhile(lambda size: size < largest, grown), largest)
