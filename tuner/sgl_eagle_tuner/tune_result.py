"""The tuner's result as a file: what was tried, what was chosen and why, per workload."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from sgl_eagle_harness.errors import ReportError
from sgl_eagle_harness.policies.policy_file import PolicySpec
from sgl_eagle_harness.records import Sha256, load_record, save_record
from sgl_eagle_tuner.provenance import RunProvenance
from sgl_eagle_tuner.report.analysis import SearchResult
from sgl_eagle_tuner.report.base import Estimate, ReportModel
from sgl_eagle_tuner.report.speed import PolicySetting, SettingRole, StepTimeSplit

TUNE_SCHEMA_VERSION: Literal[1] = 1


class PriceTrajectory(ReportModel):
    """How the price of time was found."""

    price_tok_per_us: float = Field(gt=0)
    """Fixed point, tokens per microsecond: the price at which it equals the throughput."""
    converged: bool
    """Whether price and throughput agreed at the end."""
    trajectory: tuple[tuple[float, float], ...]
    """(price, throughput reached) of each iteration, tokens per microsecond."""


class ReplayedSetting(ReportModel):
    """One policy, replayed on tuning and held-out prompts; all speeds are predictions."""

    role: SettingRole
    """Why it is here."""
    policy: PolicySetting
    """The setting, for people."""
    spec: PolicySpec
    """The setting, for the policy file."""
    tuning_us_per_token: float = Field(gt=0)
    """Microseconds per emitted token on the tuning prompts: what was minimised."""
    us_per_token: float = Field(gt=0)
    """The same on the held-out prompts."""
    tok_per_s: Estimate
    """Completion tokens per second on the held-out prompts, interval over prompts."""
    gain_over_plain: Estimate
    """Held-out tokens/s over plain decoding's, paired by prompt."""
    gain_over_best_static: Estimate
    """Held-out tokens/s over the best static setting's, paired by prompt."""
    accept_length: float = Field(ge=1)
    """Held-out completion tokens per target pass, bonus token included."""
    accept_rate: float | None = Field(default=None, ge=0, le=1)
    """Correct drafts per proposed draft; None if nothing was proposed."""
    mean_num_draft_tokens: float = Field(ge=1)
    """Mean nodes verified a step, root included."""
    mean_num_steps: float = Field(ge=0)
    """Mean draft steps taken a step."""
    speculated_share: float = Field(ge=0, le=1)
    """Share of steps that drafted at all."""
    switches: int = Field(ge=0)
    """Times that speculation was turned on or off within a prompt."""
    uncovered_share: float = Field(ge=0, le=1)
    """Share of held-out steps whose tree the trace does not fully hold."""
    step_time: StepTimeSplit
    """Mean step by part, from the cost table."""


class WorkloadTuning(ReportModel):
    """Everything about one workload."""

    workload: str
    """Name."""
    recommended: SettingRole
    """Role of the setting to run."""
    reason: str
    """Why, in a sentence."""
    settings: tuple[ReplayedSetting, ...]
    """Plain, usual (if the trace covers it), best static, tuned, then variants of tuned: one
    decision switched off, or the price moved to its fixed point."""
    finalists: tuple[ReplayedSetting, ...]
    """Best trials on the tuning prompts, best first, rescored; the first one is "tuned"."""
    price: PriceTrajectory
    """Price of time of the untuned price rule."""
    search: SearchResult
    """Trials and sensitivity."""
    num_tuning_prompts: int = Field(ge=1)
    """Prompts that trials were scored on."""
    num_held_out_prompts: int = Field(ge=1)
    """Prompts that only finalists and baselines were scored on."""

    def setting(self, role: SettingRole) -> ReplayedSetting | None:
        """The setting of a role.

        Args:
            role: Any role but "variant", of which there may be many.

        Returns:
            The setting, or None if there is none.
        """
        return next((setting for setting in self.settings if setting.role == role), None)

    @property
    def chosen(self) -> ReplayedSetting:
        """The recommended setting."""
        return next(setting for setting in self.settings if setting.role == self.recommended)


class TuneResult(ReportModel):
    """One run of the tuner."""

    schema_version: Literal[1] = TUNE_SCHEMA_VERSION
    """Version of this layout."""
    batch_size: int = Field(ge=1)
    """Requests decoded together."""
    uncovered_limit: float = Field(ge=0, le=1)
    """Share of steps beyond the recorded trees above which a setting is infeasible."""
    workloads: tuple[WorkloadTuning, ...] = Field(min_length=1)
    """In the order of the trace."""
    gain_over_plain: Estimate
    """Recommended policies over plain decoding, all held-out prompts together."""
    gain_over_best_static: Estimate
    """Recommended policies over each workload's best static setting."""
    default_workload: str
    """Workload whose policy is the policy file's default: the fastest over all prompts."""
    trace_sha256: tuple[Sha256, ...]
    """Digests of the trace files."""
    cost_sha256: Sha256
    """Digest of the cost table."""
    provenance: RunProvenance
    """Versions, machine, commit, command, seed."""


def load_tune_result(path: Path) -> TuneResult:
    """Read a result.

    Args:
        path: JSON file.

    Returns:
        The checked result.

    Raises:
        ReportError: If the file cannot be used; names file and field.
    """
    return load_record(path, TuneResult, ReportError, schema_version=TUNE_SCHEMA_VERSION)


def save_tune_result(path: Path, result: TuneResult) -> None:
    """Write a result, whole or not at all.

    Args:
        path: JSON file.
        result: What to write.

    Raises:
        OutputError: If the file cannot be written.
    """
    save_record(path, result)
