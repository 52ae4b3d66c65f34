"""What was measured per workload and setting, and what is recommended from it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from sgl_eagle_tuner.report.base import Estimate, ReportModel

SettingRole = Literal["plain", "usual", "best_static", "tuned", "variant"]
"""plain: no speculation; usual: EAGLE-3's 5 steps, topk 4, 8 tokens; best_static: best of the full
grid of static settings on the tuning prompts; tuned: what the tuner found; variant: the tuned
policy with one decision switched off."""


class PolicySetting(ReportModel):
    """A policy and the flags that bound its trees, in SGLang's terms."""

    name: str
    """The policy's own name, e.g. "eagle2-5-4-8"."""
    kind: str
    """Kind in the policy file: "plain", "static", "eagle2", "price"."""
    num_steps: int | None = Field(default=None, ge=1)
    """Draft steps at most; None for plain decoding."""
    topk: int | None = Field(default=None, ge=1)
    """Children of an expanded node; None for plain decoding."""
    num_draft_tokens: int | None = Field(default=None, ge=1)
    """Nodes verified at most, root included; None for plain decoding."""
    verify_sizes: tuple[int, ...] | None = None
    """Verify sizes (root included) among which the policy chooses; None if it has one."""
    price_tok_per_us: float | None = Field(default=None, gt=0)
    """The price of time, tokens per microsecond; None if the policy has none."""
    calibration: str | None = None
    """Kind of calibration map, e.g. "isotonic"; None if the policy uses none."""
    decisions: tuple[str, ...] = ()
    """Decisions that the policy takes each step, e.g. ["prune", "stop", "width", "speculate"]."""


class StepTimeSplit(ReportModel):
    """Mean time of one step (one target pass and what led to it) by part, in microseconds."""

    draft_extend_us: float | None = Field(default=None, ge=0)
    """Draft-extend: bringing the draft's cache up to date with the tokens just accepted."""
    draft_us: float | None = Field(default=None, ge=0)
    """All draft steps of the step, LM head and top-k included."""
    decide_us: float | None = Field(default=None, ge=0)
    """The policy's own decisions."""
    verify_us: float | None = Field(default=None, ge=0)
    """The target's pass; of one token where the step decoded plainly."""
    other_us: float | None = Field(default=None, ge=0)
    """Whatever of the step's time the other parts do not hold."""


class SettingResult(ReportModel):
    """One policy on one workload's held-out prompts."""

    role: SettingRole
    """Why the setting is in the report; each role but "variant" at most once per workload."""
    policy: PolicySetting
    """The setting itself."""
    measured_tok_per_s: Estimate | None = None
    """Completion tokens per second, running the engine; interval over prompts."""
    predicted_tok_per_s: Estimate | None = None
    """The same from replaying dense traces with the cost table."""
    gain_over_plain: Estimate | None = None
    """Measured tokens/s over that of plain decoding, paired by prompt; 1.25 is 25 % faster."""
    gain_over_best_static: Estimate | None = None
    """Measured tokens/s over that of the best static setting, paired by prompt."""
    time_per_token_us: Estimate | None = None
    """Measured microseconds per completion token."""
    accept_length: Estimate | None = None
    """Completion tokens per target pass, bonus token included; a mean."""
    accept_rate: float | None = Field(default=None, ge=0, le=1)
    """Correct drafts per proposed draft (verified node other than the root)."""
    mean_num_draft_tokens: float | None = Field(default=None, ge=1)
    """Mean nodes verified a step, root included."""
    mean_num_steps: float | None = Field(default=None, ge=0)
    """Mean draft steps taken a step."""
    speculated_share: float | None = Field(default=None, ge=0, le=1)
    """Share of steps that drafted at all."""
    step_time: StepTimeSplit | None = None
    """Measured split of the mean step."""
    num_prompts: int | None = Field(default=None, ge=0)
    """Held-out prompts measured."""
    num_tokens: int | None = Field(default=None, ge=0)
    """Completion tokens measured."""


class WorkloadResult(ReportModel):
    """All settings of one workload, and which of them to run."""

    workload: str
    """Name, e.g. "code"."""
    recommended: SettingRole
    """Role of the setting to run; "variant" is not allowed."""
    reason: str
    """One sentence: why, e.g. "The gain over the best static setting clears its interval."."""
    settings: tuple[SettingResult, ...]
    """Plain first, then usual, best static, tuned, variants."""

    @model_validator(mode="after")
    def _check_roles(self) -> Self:
        roles = [setting.role for setting in self.settings if setting.role != "variant"]
        doubled = sorted({role for role in roles if roles.count(role) > 1})
        if doubled:
            raise ValueError(f"workload {self.workload!r} has more than one of {doubled}")
        if self.recommended not in roles:
            raise ValueError(
                f"workload {self.workload!r} recommends {self.recommended!r}, which is not among "
                f"its settings; allowed: {roles}"
            )
        return self

    def setting(self, role: SettingRole) -> SettingResult | None:
        """The setting of a role.

        Args:
            role: Any role but "variant", of which there may be many.

        Returns:
            The setting, or None if this workload has none of that role.
        """
        return next((setting for setting in self.settings if setting.role == role), None)


class OverallResult(ReportModel):
    """All workloads together: total tokens over total time, one policy per workload."""

    gain_over_plain: Estimate | None = None
    """Recommended policies over plain decoding, ratio of tokens/s."""
    gain_over_best_static: Estimate | None = None
    """Recommended policies over the best static setting of each workload."""
    gain_over_usual: Estimate | None = None
    """Recommended policies over 5 steps, topk 4, 8 tokens everywhere."""
    worst_prediction_error: float | None = Field(default=None, ge=0)
    """Largest |predicted / measured - 1| of tokens/s over workloads and settings, as a fraction."""
