"""What lets an interrupted training of factors go on: one safetensors file and the curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sgl_eagle.reference.head_factors import HeadFactors
from sgl_eagle.reference.training_state import read_training_state, write_training_state

if TYPE_CHECKING:
    from sgl_eagle.reference.head_train import HeadTrainConfig

STATE_FILE = "train_state.safetensors"
CURVE_FILE = "train_curve.json"


@dataclass(frozen=True, kw_only=True)
class HeadCurvePoint:
    """One evaluation during training, on held-out rows.

    Attributes:
        update: Optimizer steps done; 0 is the start, before any.
        seconds: Wall-clock time of training so far, evaluations included.
        step_kl: Mean divergence from the full head at each draft step, in nats.
        recall: Share of rows whose most probable token by the full head is among the candidates.
        num_rows: Rows evaluated, over all draft steps.
    """

    update: int
    seconds: float
    step_kl: tuple[float, ...]
    recall: float
    num_rows: int


@dataclass(frozen=True, slots=True)
class HeadTrainFolder:
    """Where curve and state of a training lie.

    Attributes:
        path: Folder, made when something is written.
    """

    path: Path

    def save(
        self,
        factors: HeadFactors,
        optimizer: torch.optim.Optimizer,
        config: HeadTrainConfig,
        curve: Sequence[HeadCurvePoint],
    ) -> None:
        """Write state and curve.

        Args:
            factors: Parameters in float32.
            optimizer: Adam over them.
            config: How the run was started.
            curve: Evaluations so far, at least one.

        Raises:
            OutputError: If the folder cannot be written.
        """
        write_training_state(
            self.path / STATE_FILE,
            self.path / CURVE_FILE,
            factors._asdict(),
            optimizer,
            config=asdict(config),
            curve=[asdict(point) for point in curve],
        )

    def load(
        self, factors: HeadFactors, optimizer: torch.optim.Optimizer, config: HeadTrainConfig
    ) -> list[HeadCurvePoint]:
        """Take up a run where its latest evaluation left it.

        Args:
            factors: Parameters, which get the stored values.
            optimizer: Adam over them, which gets the moments.
            config: Must equal the configuration that the run was started with.

        Returns:
            The curve so far.

        Raises:
            CheckpointError: If the state is missing, damaged or of another configuration.
        """
        return read_training_state(
            self.path / STATE_FILE,
            factors._asdict(),
            optimizer,
            config=asdict(config),
            device=factors.up.device,
            make_point=HeadCurvePoint,
        )
