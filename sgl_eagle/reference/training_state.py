"""Parameters, Adam's moments, configuration and curve of a training run in one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sgl_eagle.reference.tensor_file import save_tensors
from sgl_eagle_harness.atomic_file import write_text
from sgl_eagle_harness.errors import CheckpointError

_MOMENTS = ("exp_avg", "exp_avg_sq")

Point = TypeVar("Point")

Record = Mapping[str, Any]
"""A configuration or a point of a curve, as JSON holds it."""


def write_training_state(
    state_file: Path,
    curve_file: Path,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    config: Record,
    curve: Sequence[Record],
) -> None:
    """Write state and curve, each file whole or not at all.

    Args:
        state_file: Safetensors file.
        curve_file: JSON file.
        parameters: What is trained, by name.
        optimizer: Adam or AdamW over them, after at least one step.
        config: How the run was started.
        curve: Evaluations so far.

    Raises:
        OutputError: If a file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensors[f"weight.{name}"] = parameter.detach()
        for moment in _MOMENTS:
            tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    metadata = {"config": json.dumps(config), "curve": json.dumps(curve)}
    save_tensors(state_file, tensors, metadata=metadata)
    write_text(curve_file, json.dumps(curve, indent=1) + "\n")


def read_training_state(
    state_file: Path,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    config: Record,
    device: torch.device,
    make_point: Callable[..., Point],
) -> list[Point]:
    """Take up a run where its latest evaluation left it.

    Args:
        state_file: From `write_training_state`.
        parameters: They get the stored values.
        optimizer: It gets the moments.
        config: Must equal the configuration that the run was started with.
        device: Of the parameters.
        make_point: Called with the fields of one evaluation, lists as tuples; `update` is among
            them, the optimizer steps done.

    Returns:
        The curve so far.

    Raises:
        CheckpointError: If the state is missing, damaged or of another configuration.
    """
    if not state_file.is_file():
        raise CheckpointError(f"{state_file}: no state to resume from; start without --resume")
    try:
        with safe_open(state_file, framework="pt", device=str(device)) as stream:
            metadata = stream.metadata()
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{state_file}: cannot be read, truncated?: {error}") from error
    before, curve, num_updates = _read_metadata(state_file, metadata or {}, make_point)
    now = json.loads(json.dumps(config))
    changed = sorted(name for name in now if before.get(name) != now[name])
    if changed:
        raise CheckpointError(
            f"{state_file}: was started with another configuration: "
            + ", ".join(f"{name} {before.get(name)} now {now[name]}" for name in changed)
        )
    _require_tensors(state_file, tensors, parameters)
    updates = torch.tensor(float(num_updates), device=device)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"weight.{name}"])
            optimizer.state[parameter] = {
                "step": updates.clone() if parameter.is_cuda else updates.cpu().clone(),
                **{moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS},
            }
    return curve


def _read_metadata(
    state_file: Path, metadata: Mapping[str, str], make_point: Callable[..., Point]
) -> tuple[dict[str, Any], list[Point], int]:
    # The configuration, the curve, and the optimizer steps done.
    try:
        config, points = dict(json.loads(metadata["config"])), json.loads(metadata["curve"])
        curve = [make_point(**_with_tuples(point)) for point in points]
        return config, curve, int(points[-1]["update"])
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{state_file}: holds no configuration and curve of a training: {error!r}"
        ) from error


def _require_tensors(
    state_file: Path, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> None:
    for name, parameter in parameters.items():
        for kind in ("weight", *_MOMENTS):
            found = tensors.get(f"{kind}.{name}")
            if found is None or found.shape != parameter.shape or not found.isfinite().all():
                shape = "missing" if found is None else f"{list(found.shape)}"
                raise CheckpointError(
                    f"{state_file}: {kind}.{name} must be {list(parameter.shape)} finite numbers, "
                    f"got {shape}"
                )


def _with_tuples(point: Record) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in point.items()
    }
