"""How to train a draft; apart from the training, so that help need not load torch."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_eagle.reference.draft_config import DraftKind
from sgl_eagle_harness.errors import SglEagleError


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train.

    Attributes:
        kind: "eagle3" or "eagle1".
        num_updates: Optimizer steps.
        batch_tokens: Tokens of one update over all processes, padding included.
        learning_rate: Peak, reached after `warmup` updates; a cosine takes it to a twentieth.
        warmup: Updates.
        weight_decay: Of AdamW, on matrices only.
        clip_norm: Largest norm of the gradient.
        num_steps: Draft steps of training-time test (EAGLE-3); EAGLE-1 trains one.
        step_decay: Weight of a draft step over that of the step before.
        feature_noise: Half width of the uniform noise on features (EAGLE-1).
        head_weight: Weight of the cross entropy beside the feature loss (EAGLE-1).
        intermediate_size: MLP width of the draft.
        held_out_rows: Rows evaluated on.
        eval_every: Updates between evaluations and between resumable states.
        seed: Of initial weights, order of batches and noise.
    """

    kind: DraftKind = "eagle3"
    num_updates: int = 3000
    batch_tokens: int = 32768
    learning_rate: float = 1e-3
    warmup: int = 150
    weight_decay: float = 0.01
    clip_norm: float = 0.5
    num_steps: int = 6
    step_decay: float = 0.8
    feature_noise: float = 0.1
    head_weight: float = 0.1
    intermediate_size: int = 3072
    held_out_rows: int = 384
    eval_every: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_updates", "batch_tokens", "num_steps", "eval_every", "held_out_rows"):
            if getattr(self, name) < 1:
                raise SglEagleError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.learning_rate < 1:
            raise SglEagleError(f"learning_rate must be in (0, 1), got {self.learning_rate}")
