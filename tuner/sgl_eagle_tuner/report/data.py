"""Everything a report shows, as numbers: stored as JSON beside the page, which is rendered from it.

The sections are in `speed` (results and recommendation), `analysis` (costs, calibration, search,
correctness) and `trees`. A number that was not measured is None and prints as "not measured".
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import AwareDatetime, Field, model_validator

from sgl_eagle_harness.errors import ReportError
from sgl_eagle_harness.records import load_record, save_record
from sgl_eagle_tuner.report.analysis import (
    CalibrationResult,
    CorrectnessCheck,
    CostSection,
    SearchResult,
)
from sgl_eagle_tuner.report.base import ReportModel
from sgl_eagle_tuner.report.speed import OverallResult, WorkloadResult
from sgl_eagle_tuner.report.trees import DrawnTree

SCHEMA_VERSION = 1
"""Layout of a report's JSON file."""

REPORT_FILE = "report.json"
"""Name of the numbers' file in a run's folder."""


class StageTime(ReportModel):
    """Wall time of one stage of the run."""

    name: str
    """Stage, e.g. "record dense traces"."""
    seconds: float = Field(ge=0)
    """Wall time."""
    note: str | None = None
    """What it did, e.g. "120 prompts, 7,431 positions"."""


class ModelIdentity(ReportModel):
    """A model, exactly."""

    name: str
    """Name, e.g. "SmolLM2-135M-Instruct"."""
    digest: str | None = None
    """sha256 of its weights file."""
    description: str | None = None
    """Dimensions or head kind, e.g. "EAGLE-3.1 head, 8.1 M parameters"."""


class Provenance(ReportModel):
    """What every number of the report depends on."""

    created: AwareDatetime
    """When the run ended."""
    command: str
    """Command line that made the report."""
    commit: str | None = None
    """Commit of sgl-eagle, "-dirty" appended when files had changed."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Package to version: sgl-eagle, python, torch, ..."""
    engine: str
    """Engine that was measured, e.g. "reference engine" or "SGLang 0.5.23"."""
    device: str
    """Device that the models ran on, e.g. "CPU" or "NVIDIA H200"."""
    cpu: str | None = None
    """CPU model."""
    num_threads: int | None = Field(default=None, ge=1)
    """Threads of the numerical library."""
    dtype: str | None = None
    """Weights and activations, e.g. "bfloat16"."""
    attention_backend: str | None = None
    """Attention implementation, e.g. "sdpa"."""
    batch_size: int | None = Field(default=None, ge=1)
    """Requests decoded together while measuring."""
    target: ModelIdentity
    """Target model."""
    draft: ModelIdentity
    """Draft head."""
    sampling: str | None = None
    """Sampling, e.g. "temperature 0"."""
    prompts: dict[str, str] = Field(default_factory=dict)
    """Prompt set to size and origin, e.g. {"tuning": "120 prompts, shipped"}."""
    seeds: dict[str, int] = Field(default_factory=dict)
    """Use to seed: record, tune, bootstrap, ..."""
    details: dict[str, str] = Field(default_factory=dict)
    """Anything else worth knowing, name to text, e.g. {"bootstrap": "2000 resamples"}."""


class DemoReport(ReportModel):
    """All numbers of one report; `render_report` turns it into one HTML page."""

    schema_version: Literal[1] = 1
    """Version of this layout; readers refuse others."""
    title: str
    """Page title, e.g. "Speculation settings for SmolLM2-135M-Instruct on 2 CPU cores"."""
    sglang_algorithm: Literal["EAGLE", "EAGLE3"] = "EAGLE3"
    """Value of --speculative-algorithm with which stock SGLang runs the draft head."""
    policy_file: str | None = None
    """Name of the tuned policy file, as a user would pass it."""
    serving_note: str | None = None
    """What keeps a reader from using the flags as they stand, printed under the recommendation."""
    synthetic: bool = False
    """True if the numbers are made up (tests); the page says so in a banner."""
    overall: OverallResult = OverallResult()
    """All workloads together."""
    workloads: tuple[WorkloadResult, ...] = Field(min_length=1)
    """Per workload results, in the order of the page."""
    costs: CostSection | None = None
    """Cost table."""
    calibrations: tuple[CalibrationResult, ...] = ()
    """Reliability, "all" first."""
    trees: tuple[DrawnTree, ...] = ()
    """Real steps to draw."""
    searches: tuple[SearchResult, ...] = ()
    """Studies."""
    correctness: tuple[CorrectnessCheck, ...] = ()
    """Exactness counts."""
    stages: tuple[StageTime, ...] = ()
    """Where the time went, in order."""
    provenance: Provenance
    """Versions, machine, models, sample sizes, seeds."""

    @model_validator(mode="after")
    def _check_workloads(self) -> Self:
        names = [result.workload for result in self.workloads]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"each workload may appear once, got {doubled} more than once")
        return self


def load_report(path: Path) -> DemoReport:
    """Read the numbers of a report.

    Args:
        path: JSON file that `save_report` wrote.

    Returns:
        The checked data.

    Raises:
        ReportError: If the file cannot be read, has another version, or a field is missing, unknown
            or out of range.
    """
    return load_record(path, DemoReport, ReportError, schema_version=SCHEMA_VERSION)


def save_report(report: DemoReport, path: Path) -> None:
    """Write the numbers of a report, whole or not at all.

    Args:
        report: The data.
        path: JSON file to make or replace.
    """
    save_record(path, report)
