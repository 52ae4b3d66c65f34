"""What lets an interrupted training run go on: one safetensors file, nothing pickled."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sgl_eagle.reference.draft_models import Draft
from sgl_eagle_harness.errors import CheckpointError, OutputError

if TYPE_CHECKING:
    from sgl_eagle.reference.train_config import TrainConfig

STATE_FILE = "state.safetensors"
CURVE_FILE = "curve.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One evaluation during training.

    Attributes:
        update: Optimizer steps done.
        num_tokens: Tokens trained on so far, padding included.
        seconds: Wall-clock time so far, evaluations included.
        step_losses: Cross entropy of each draft step on the latest batch, in nats.
        step_accept_rate: Of each draft step on held-out rows, given that the steps before it were
            accepted; greedy target, chain of most probable drafts.
        accept_length: Implied by them for a chain of all evaluated steps, bonus token included.
        num_roots: Held-out positions evaluated.
    """

    update: int
    num_tokens: int
    seconds: float
    step_losses: tuple[float, ...]
    step_accept_rate: tuple[float, ...]
    accept_length: float
    num_roots: int


def save_state(
    folder: Path,
    draft: Draft,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    curve: Sequence[CurvePoint],
) -> None:
    """Write the state after an evaluation, and the curve beside it.

    Args:
        folder: Existing folder.
        draft: Float32 weights.
        optimizer: AdamW over the draft's parameters.
        config: How the run was started.
        curve: Evaluations so far, at least one.

    Raises:
        OutputError: If the folder cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in draft.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach()
        for moment in _MOMENTS:
            tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    points = [asdict(point) for point in curve]
    metadata = {"config": json.dumps(asdict(config)), "curve": json.dumps(points)}
    partial_state, partial_curve = (
        folder / f"{STATE_FILE}.partial",
        folder / f"{CURVE_FILE}.partial",
    )
    try:
        save_file(tensors, partial_state, metadata=metadata)
        partial_curve.write_text(json.dumps(points, indent=1) + "\n", encoding="utf-8")
        os.replace(partial_state, folder / STATE_FILE)  # noqa: PTH105
        os.replace(partial_curve, folder / CURVE_FILE)  # noqa: PTH105
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{folder}: cannot be written: {error}") from error


def load_state(
    folder: Path, draft: Draft, optimizer: torch.optim.Optimizer, config: TrainConfig
) -> list[CurvePoint]:
    """Take up a run where its latest evaluation left it.

    Args:
        folder: Written by `save_state`.
        draft: Gets the weights.
        optimizer: Gets the moments.
        config: Must equal the configuration that the run was started with.

    Returns:
        The curve so far.

    Raises:
        CheckpointError: If the state is missing, damaged or of another configuration.
    """
    file = folder / STATE_FILE
    if not file.is_file():
        raise CheckpointError(f"{file}: no state to resume from; start without --resume")
    try:
        with safe_open(file, framework="pt", device=str(draft.lm_head.device)) as stream:
            metadata = stream.metadata()
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: cannot be read, truncated?: {error}") from error
    before, now = json.loads(metadata["config"]), json.loads(json.dumps(asdict(config)))
    changed = sorted(name for name in now if before.get(name) != now[name])
    if changed:
        raise CheckpointError(
            f"{file}: was started with another configuration: "
            + ", ".join(f"{name} {before.get(name)} now {now[name]}" for name in changed)
        )
    curve = [_curve_point(point) for point in json.loads(metadata["curve"])]
    updates = torch.tensor(float(curve[-1].update), device=draft.lm_head.device)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.copy_(tensors[f"weight.{name}"])
            optimizer.state[parameter] = {
                "step": updates.clone() if parameter.is_cuda else updates.cpu().clone(),
                **{moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS},
            }
    return curve


def _curve_point(raw: dict[str, object]) -> CurvePoint:
    lists = {name: tuple(value) for name, value in raw.items() if isinstance(value, list)}
    return CurvePoint(**{**raw, **lists})  # type: ignore[arg-type]
