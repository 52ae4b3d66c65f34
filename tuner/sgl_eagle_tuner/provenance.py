"""Where a result came from: versions, machine, commit, command, seed, time."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from pydantic import AwareDatetime, BaseModel, ConfigDict

from sgl_eagle_harness.trace_schema import SourceFile
from sgl_eagle_harness.trace_store import list_shards

PACKAGES = ("sgl-eagle", "numpy", "scipy", "optuna", "pyarrow", "torch", "transformers", "sglang")
GIT_TIMEOUT_S = 5


class RunProvenance(BaseModel):
    """What a number depends on besides its inputs."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    created: AwareDatetime
    """When it was made, UTC."""
    command: str
    """Command line."""
    seed: int
    """Seed of everything random."""
    commit: str | None
    """Commit of sgl-eagle, "-dirty" appended when files had changed; None outside a checkout."""
    versions: dict[str, str]
    """Package or "python" to version; packages that are not installed are left out."""
    cpu: str
    """CPU model, or the architecture where the system does not tell."""
    num_cpus: int
    """Logical CPUs that this process may use."""
    gpu: str | None
    """GPU model, None without an NVIDIA driver."""


def collect_provenance(*, seed: int, argv: Sequence[str] | None = None) -> RunProvenance:
    """Describe this process and machine.

    Args:
        seed: Seed of the run.
        argv: Command line; `sys.argv` if None.

    Returns:
        The record.
    """
    words = list(sys.argv if argv is None else argv)
    return RunProvenance(
        created=datetime.now(UTC),
        command=shlex.join([Path(words[0]).name, *words[1:]]),
        seed=seed,
        commit=_commit(Path(__file__).parent),
        versions=_versions(),
        cpu=_cpu_model(),
        num_cpus=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else (os.cpu_count() or 1),
        gpu=_gpu_model(),
    )


def describe_files(paths: Iterable[Path]) -> tuple[SourceFile, ...]:
    """Names and digests of trace shards.

    Args:
        paths: Shards, or folders of shards.

    Returns:
        One record a shard.
    """
    return tuple(
        SourceFile(name=path.name, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
        for path in list_shards(paths)
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit(folder: Path) -> str | None:
    commit = _output(["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"])
    # An installed package may lie inside some other project's checkout: its commit is not ours.
    ours = _output(["git", "-C", str(folder), "ls-files", "--error-unmatch", Path(__file__).name])
    if commit is None or ours is None:
        return None
    changed = _output(["git", "-C", str(folder), "status", "--porcelain", "-uno"])
    return f"{commit}-dirty" if changed else commit


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu_model() -> str | None:
    names = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return names.splitlines()[0].strip() if names else None


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
