"""What lets an interrupted training of factors go on: one safetensors file and the curve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sgl_eagle.reference.head_factors import HeadFactors
from sgl_eagle_harness.atomic_file import replace_when_done, write_text
from sgl_eagle_harness.errors import CheckpointError

if TYPE_CHECKING:
    from sgl_eagle.reference.head_train import HeadTrainConfig

STATE_FILE = "train_state.safetensors"
CURVE_FILE = "train_curve.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")


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
        points = [asdict(point) for point in curve]
        tensors = {}
        for name, parameter in factors._asdict().items():
            tensors[f"weight.{name}"] = parameter.detach()
            for moment in _MOMENTS:
                tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
        metadata = {"config": json.dumps(asdict(config)), "curve": json.dumps(points)}
        with replace_when_done(self.path / STATE_FILE) as temporary:
            save_file(tensors, temporary, metadata=metadata)
        write_text(self.path / CURVE_FILE, json.dumps(points, indent=1) + "\n")

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
        file = self.path / STATE_FILE
        if not file.is_file():
            raise CheckpointError(f"{file}: no state to resume from; start without --resume")
        try:
            with safe_open(file, framework="pt", device=str(factors.up.device)) as stream:
                metadata = stream.metadata()
                tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: cannot be read, truncated?: {error}") from error
        before, now = json.loads(metadata["config"]), json.loads(json.dumps(asdict(config)))
        changed = [name for name in now if before.get(name) != now[name]]
        if changed:
            raise CheckpointError(
                f"{file}: was started with another configuration: "
                + ", ".join(f"{name} {before.get(name)} now {now[name]}" for name in changed)
            )
        curve = [
            HeadCurvePoint(**{**point, "step_kl": tuple(point["step_kl"])})
            for point in json.loads(metadata["curve"])
        ]
        updates = torch.tensor(float(curve[-1].update))
        with torch.no_grad():
            for name, parameter in factors._asdict().items():
                parameter.copy_(tensors[f"weight.{name}"])
                optimizer.state[parameter] = {
                    "step": updates.to(parameter.device) if parameter.is_cuda else updates.clone(),
                    **{moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS},
                }
        return curve
