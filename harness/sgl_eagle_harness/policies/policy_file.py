"""Policy files: one policy per workload, a default, and everything needed to run them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, Field

from sgl_eagle_harness.cost_file import CostFile
from sgl_eagle_harness.errors import CostTableError, PolicyConfigError, TreeLimitsError
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.policies.registry import PolicySpec
from sgl_eagle_harness.records import ModelIdentity, Record, load_record, save_record
from sgl_eagle_harness.trace_schema import SamplingParams, SourceFile

__all__ = [
    "PolicyFile",
    "PolicyProvenance",
    "PolicySpec",
    "load_policy_file",
    "save_policy_file",
]

POLICY_SCHEMA_VERSION: Literal[1] = 1


class PolicyProvenance(Record):
    """What the policies were tuned on.

    Attributes:
        traces: Trace shards; empty for a policy written by hand.
        target: Target model.
        draft: Draft model.
        sampling: Sampling parameters of the traces; policies of another regime do not apply.
        command: Command line that made the file.
        seed: Seed of the search.
        created: When, with its zone.
        commit: Source revision, if known.
        versions: Package name to version.
    """

    traces: tuple[SourceFile, ...]
    target: ModelIdentity
    draft: ModelIdentity
    sampling: SamplingParams
    command: str
    seed: int | None
    created: AwareDatetime
    commit: str | None
    versions: dict[str, str]


class PolicyFile(Record):
    """Self-contained policies.

    Attributes:
        schema_version: Version of this layout.
        default: Policy of requests whose workload is unknown.
        workloads: Policy of each workload.
        costs: Cost table that prices refer to; None if no policy needs one.
        provenance: What the policies were tuned on.
    """

    schema_version: Literal[1] = POLICY_SCHEMA_VERSION
    default: PolicySpec
    workloads: dict[str, PolicySpec] = Field(default_factory=dict)
    costs: CostFile | None = None
    provenance: PolicyProvenance

    @property
    def cost_sha256(self) -> str | None:
        """Digest of the embedded cost table."""
        return None if self.costs is None else self.costs.sha256

    def build(self, workload: str | None = None) -> SpecPolicy:
        """Make the policy of one workload.

        Args:
            workload: Workload key; the default serves None and keys the file does not hold.

        Returns:
            The policy.

        Raises:
            PolicyConfigError: If a parameter is out of range; names the entry.
        """
        known = workload is not None and workload in self.workloads
        entry = f"workloads.{workload}" if known else "default"
        spec = self.workloads[str(workload)] if known else self.default
        try:
            return spec.build(None if self.costs is None else self.costs.to_table())
        except (PolicyConfigError, TreeLimitsError, CostTableError) as error:
            raise PolicyConfigError(f"{entry}: {error}") from error


def load_policy_file(path: Path) -> PolicyFile:
    """Read and check a policy file.

    Args:
        path: JSON file.

    Returns:
        The record; `build` cannot fail on it.

    Raises:
        PolicyConfigError: If the file cannot be used; names file, entry and field.
    """
    record = load_record(path, PolicyFile, PolicyConfigError, schema_version=POLICY_SCHEMA_VERSION)
    try:
        for workload in (None, *record.workloads):
            record.build(workload)
    except PolicyConfigError as error:
        raise PolicyConfigError(f"{path}: {error}") from error
    return record


def save_policy_file(path: Path, record: PolicyFile) -> None:
    """Write a policy file, whole or not at all.

    Args:
        path: JSON file.
        record: What to write.

    Raises:
        OutputError: If the file cannot be written.
    """
    save_record(path, record)
