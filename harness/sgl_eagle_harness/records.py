"""What every stored record has in common: strict fields, named errors, model identities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from sgl_eagle_harness.atomic_file import write_text
from sgl_eagle_harness.errors import SglEagleError

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""Lower-case hexadecimal digest."""

RecordT = TypeVar("RecordT", bound=BaseModel)


class Record(BaseModel):
    """Base of all stored models: unknown fields are refused, values cannot be reassigned."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelIdentity(Record):
    """Which weights a measurement belongs to.

    Attributes:
        name: Human-readable name, e.g. "SmolLM2-135M-Instruct".
        sha256: Digest of the weight file, or of the sorted list of digests if there are several.
        dims: Dimensions that decide cost, e.g. {"hidden_size": 576, "num_hidden_layers": 30}.
    """

    name: str = Field(min_length=1)
    sha256: Sha256
    dims: dict[str, int]

    def __str__(self) -> str:
        """Name and start of the digest, for messages.

        Returns:
            e.g. "SmolLM2-135M-Instruct (9f0a61c2b3d4)".
        """
        return f"{self.name} ({self.sha256[:12]})"


def describe_validation_error(error: ValidationError) -> str:
    """Say which fields are wrong, in one line.

    Args:
        error: What pydantic raised.

    Returns:
        "field.path: what is allowed, got value; ...", at most three fields.
    """
    shown = 3
    problems = error.errors(include_url=False)
    parts = []
    for problem in problems[:shown]:
        where = ".".join(str(step) for step in problem["loc"]) or "the record"
        if problem["type"] == "missing":  # its input is the whole record
            parts.append(f"{where}: {problem['msg']}")
            continue
        value = repr(problem["input"])
        short = value if len(value) <= 60 else value[:57] + "..."  # noqa: PLR2004 (a line's width)
        parts.append(f"{where}: {problem['msg']}, got {short}")
    if len(problems) > shown:
        parts.append(f"and {len(problems) - shown} more")
    return "; ".join(parts)


def _some(names: list[str], shown: int = 4) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def save_record(path: Path, record: BaseModel) -> None:
    """Write a model, whole or not at all.

    Args:
        path: JSON file to make or replace.
        record: What to write.

    Raises:
        OutputError: If the file cannot be written.
    """
    write_text(path, record.model_dump_json(indent=1) + "\n")


def load_record(
    path: Path, model: type[RecordT], error_type: type[SglEagleError], *, schema_version: int
) -> RecordT:
    """Read one JSON file into its model.

    Args:
        path: File to read.
        model: Pydantic model of the file.
        error_type: What to raise when it cannot be used.
        schema_version: The one version that can be read.

    Returns:
        The validated model.

    Raises:
        SglEagleError: Of `error_type`; the message names the file, and the field where there is
            one.
    """
    try:
        payload = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise error_type(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise error_type(f"{path} is not JSON: {error}") from error
    if not isinstance(payload, dict):
        raise error_type(f"{path} must hold a JSON object, got {type(payload).__name__}")
    found = payload.get("schema_version")
    if found != schema_version:
        raise error_type(
            f"{path}: schema_version must be {schema_version}, got schema_version={found!r}"
        )
    unknown = sorted(payload.keys() - model.model_fields.keys())
    missing = sorted(
        name
        for name, field in model.model_fields.items()
        if field.is_required() and name not in payload
    )
    if unknown and missing:
        raise error_type(
            f"{path} is a file of another kind: it lacks {_some(missing)} and has {_some(unknown)}"
        )
    try:
        return model.model_validate(payload)
    except ValidationError as error:
        raise error_type(f"{path}: {describe_validation_error(error)}") from error
