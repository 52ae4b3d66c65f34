"""Cost curves, reliability, search and correctness: the evidence behind the recommendation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from sgl_eagle_tuner.report.base import ReportModel

CostPart = Literal["target", "draft", "draft_extend"]
"""target: one target pass; draft: one draft step; draft_extend: draft-extend of pending tokens."""


class CostCurve(ReportModel):
    """Time of one kind of pass against its number of tokens, at one batch size and context."""

    part: CostPart
    """What was timed."""
    batch_size: int = Field(ge=1)
    """Requests decoded together."""
    context_len: int = Field(ge=0)
    """Tokens before the root."""
    num_tokens: tuple[int, ...]
    """Tokens per request: verified nodes with the root, expanded nodes, or pending tokens."""
    median_us: tuple[float, ...]
    """Median time at each of `num_tokens`, microseconds."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len(self.num_tokens) != len(self.median_us):
            raise ValueError(
                f"num_tokens has {len(self.num_tokens)} values, median_us {len(self.median_us)}"
            )
        return self


class CostError(ReportModel):
    """Predicted against measured time on grid cells that were left out of the fit."""

    part: CostPart
    """Kind of pass."""
    num_cells: int = Field(ge=1)
    """Cells left out."""
    median_rel_error: float = Field(ge=0)
    """Median of |predicted / measured - 1|, as a fraction."""
    max_rel_error: float = Field(ge=0)
    """Largest of them."""


class CostSection(ReportModel):
    """The cost table, as far as the report draws it."""

    curves: tuple[CostCurve, ...] = ()
    """Measured curves; every batch size x context of the grid, or a readable part of it."""
    errors: tuple[CostError, ...] = ()
    """The table's own error, per kind of pass."""
    decide_us: float | None = Field(default=None, ge=0)
    """Median time of one decision after a draft step."""
    verify_select_us: float | None = Field(default=None, ge=0)
    """Median time of choosing the nodes to verify."""
    digest: str | None = None
    """sha256 of the table file."""


class ReliabilityBin(ReportModel):
    """Nodes of similar confidence and how often the target accepted them."""

    confidence: float = Field(ge=0, le=1)
    """Mean confidence in the bin."""
    accept_rate: float = Field(ge=0, le=1)
    """Share of the bin's nodes whose whole path was accepted."""
    low: float | None = Field(default=None, ge=0, le=1)
    """Lower end of the Wilson 95 % interval of `accept_rate`."""
    high: float | None = Field(default=None, ge=0, le=1)
    """Upper end."""
    count: int = Field(ge=1)
    """Nodes in the bin."""


class ReliabilityCurve(ReportModel):
    """Reliability of one confidence on held-out prompts."""

    kind: str
    """Calibration map: "identity" before, e.g. "isotonic" after."""
    bins: tuple[ReliabilityBin, ...]
    """Ascending in confidence."""
    ece: float | None = Field(default=None, ge=0, le=1)
    """Expected calibration error, bins of equal mass."""
    brier: float | None = Field(default=None, ge=0, le=1)
    """Brier score."""
    auc: float | None = Field(default=None, ge=0, le=1)
    """Area under the ROC curve (Mann-Whitney)."""


class CalibrationResult(ReportModel):
    """Reliability before and after calibration, on prompts that no fit has seen."""

    workload: str
    """Workload, or "all"."""
    before: ReliabilityCurve | None = None
    """Draft path confidence as it is."""
    after: ReliabilityCurve | None = None
    """Calibrated acceptance probability."""
    num_prompts: int | None = Field(default=None, ge=0)
    """Held-out prompts."""
    num_nodes: int | None = Field(default=None, ge=0)
    """Drafted nodes judged."""


class Trial(ReportModel):
    """One setting that the tuner replayed on the tuning prompts."""

    number: int = Field(ge=0)
    """Order in the study."""
    time_per_token_us: float | None = Field(default=None, gt=0)
    """Objective, microseconds per emitted token; None if infeasible."""
    baseline: str | None = None
    """Name of the baseline that was enqueued; None for a sampled trial."""


class Importance(ReportModel):
    """How much one parameter moves the objective."""

    param: str
    """Parameter of the search space."""
    share: float = Field(ge=0, le=1)
    """Share of the variation between trials; shares of a workload add up to at most 1."""


class Marginal(ReportModel):
    """Objective against one parameter, the others as the sampler had them."""

    param: str
    """Parameter of the search space."""
    values: tuple[str, ...]
    """Its values or ranges, as text, in order."""
    best_us: tuple[float, ...]
    """Lowest time per token among the trials of each value, microseconds."""
    median_us: tuple[float, ...]
    """Median time per token among them."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if not len(self.values) == len(self.best_us) == len(self.median_us):
            raise ValueError(
                f"values, best_us and median_us of {self.param!r} must have equal lengths, got "
                f"{len(self.values)}, {len(self.best_us)}, {len(self.median_us)}"
            )
        return self


class SearchResult(ReportModel):
    """The study of one workload."""

    workload: str
    """Workload."""
    trials: tuple[Trial, ...] = ()
    """In order of their numbers, baselines first."""
    importances: tuple[Importance, ...] = ()
    """Most important first."""
    marginals: tuple[Marginal, ...] = ()
    """Sensitivity, most important parameter first."""
    uncovered_limit: float | None = Field(default=None, ge=0, le=1)
    """Share of positions a trial may need beyond the recorded trees before it is infeasible."""
    num_positions: int | None = Field(default=None, ge=0)
    """Trace positions replayed per trial."""
    seconds: float | None = Field(default=None, ge=0)
    """Wall time of the study."""


class CorrectnessCheck(ReportModel):
    """One exactness claim and its counts."""

    name: str
    """What was compared, e.g. "Greedy output equals plain decoding"."""
    setting: str
    """Policy, or "all policies", with the dtype."""
    unit: str
    """What is counted, plural, e.g. "prompts", "steps"."""
    num_prompts: int | None = Field(default=None, ge=0)
    """Prompts behind the counts."""
    num_compared: int = Field(ge=0)
    """Comparisons made."""
    num_equal: int = Field(ge=0)
    """Of them, equal."""
    num_near_ties: int = Field(default=0, ge=0)
    """Different, but only at a numerical near tie."""
    bound: str | None = None
    """What counts as a near tie, e.g. "top-two logit gap below 0.05"."""

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        if self.num_equal + self.num_near_ties > self.num_compared:
            raise ValueError(
                f"num_equal + num_near_ties must not exceed num_compared, got {self.num_equal} + "
                f"{self.num_near_ties} > {self.num_compared}"
            )
        return self

    @property
    def num_different(self) -> int:
        """Differences that no near tie excuses."""
        return self.num_compared - self.num_equal - self.num_near_ties
