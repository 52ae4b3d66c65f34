"""What lets an interrupted training run go on: one safetensors file, nothing pickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sgl_eagle.reference.draft_models import Draft
from sgl_eagle.reference.training_state import read_training_state, write_training_state

if TYPE_CHECKING:
    from sgl_eagle.reference.train_config import TrainConfig

STATE_FILE = "state.safetensors"
CURVE_FILE = "curve.json"


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
        folder: Made if missing.
        draft: Float32 weights.
        optimizer: AdamW over the draft's parameters.
        config: How the run was started.
        curve: Evaluations so far, at least one.

    Raises:
        OutputError: If the folder cannot be written.
    """
    write_training_state(
        folder / STATE_FILE,
        folder / CURVE_FILE,
        dict(draft.named_parameters()),
        optimizer,
        config=asdict(config),
        curve=[asdict(point) for point in curve],
    )


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
    return read_training_state(
        folder / STATE_FILE,
        dict(draft.named_parameters()),
        optimizer,
        config=asdict(config),
        device=draft.lm_head.device,
        make_point=CurvePoint,
    )
