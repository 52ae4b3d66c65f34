"""Train an EAGLE draft head for one target, with training-time test.

EAGLE-3 learns to predict the target's distribution over several draft steps, each fed with the step
before (arXiv 2503.01840). EAGLE-1 learns to predict the target's next feature from noisy ones, with
the distribution as a second goal (arXiv 2401.15077). Only the one decoder layer is trained.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from sgl_eagle.reference.draft_chain import (
    ChainAccuracy,
    capture_states,
    count_correct,
    run_chain,
    summarise_counts,
)
from sgl_eagle.reference.draft_checkpoint import save_draft
from sgl_eagle.reference.draft_config import DraftConfig, DraftKind
from sgl_eagle.reference.draft_models import Draft, Eagle3Draft, build_draft
from sgl_eagle.reference.generate_text import TextRows
from sgl_eagle.reference.head_loss import soft_cross_entropy
from sgl_eagle.reference.train_config import TrainConfig
from sgl_eagle.reference.train_data import (
    TextBatch,
    load_batch,
    plan_batches,
    split_held_out,
)
from sgl_eagle.reference.train_ranks import average_gradients, current_rank, num_ranks
from sgl_eagle.reference.train_state import CurvePoint, load_state, save_state

EVAL_STEPS = 8


def draft_config_for(
    target_config: Any,  # noqa: ANN401  each family has its own class
    *,
    kind: DraftKind,
    intermediate_size: int,
) -> DraftConfig:
    """The draft that is trained for a target: its own width and heads, full vocabulary.

    Args:
        target_config: Hugging Face configuration of the target.
        kind: "eagle3" (with the norms of EAGLE-3.1) or "eagle1".
        intermediate_size: MLP width of the draft.

    Returns:
        The configuration.
    """
    num_layers = target_config.num_hidden_layers
    heads = target_config.num_attention_heads
    config = DraftConfig(
        kind=kind,
        hidden_size=target_config.hidden_size,
        intermediate_size=intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=target_config.num_key_value_heads,
        head_dim=getattr(target_config, "head_dim", None) or target_config.hidden_size // heads,
        rms_norm_eps=float(target_config.rms_norm_eps),
        rope_parameters=dict(target_config.rope_parameters),
        max_position_embeddings=target_config.max_position_embeddings,
        vocab_size=target_config.vocab_size,
        draft_vocab_size=target_config.vocab_size,
        target_hidden_size=target_config.hidden_size,
        fc_bias=kind == "eagle1",
        fc_norm=kind == "eagle3",
        norm_output=kind == "eagle3",
    )
    if kind == "eagle1":
        return config
    captured = config.hidden_state_indices(num_layers)
    # Written out, so that no reader depends on anybody's default.
    return replace(config, aux_layer_ids=tuple(index - 1 for index in captured))


def train_draft(
    model: Any,  # noqa: ANN401  likewise
    rows: TextRows,
    config: TrainConfig,
    folder: Path,
    *,
    resume: bool = False,
    quiet: bool = False,
) -> list[CurvePoint]:
    """Train a draft and write it, its curve and a resumable state into a folder.

    Args:
        model: Hugging Face target on its device; it stays frozen.
        rows: Text the target wrote.
        config: How to train.
        folder: Gets `config.json`, `model.safetensors`, `curve.json` and `state.safetensors`.
        resume: Go on from the folder's state instead of starting anew.
        quiet: Show no progress.

    Returns:
        The evaluations, the last one after the last update; under `torchrun` the first process
        evaluates and writes, the others return what they resumed from.
    """
    trainer = _Trainer(model, rows, config)
    curve = load_state(folder, trainer.draft, trainer.optimizer, config) if resume else []
    first = curve[-1].update if curve else 0
    began = time.perf_counter()
    seconds_before = curve[-1].seconds if curve else 0.0
    label = f"train {config.kind}"
    with tqdm(
        total=config.num_updates, initial=first, desc=label, disable=quiet or current_rank() > 0
    ) as progress:
        for update, batch in trainer.batches(first):
            losses = trainer.update(update, batch)
            progress.update()
            done = update + 1
            due = done % config.eval_every == 0 or done == config.num_updates
            if not due or current_rank() > 0:
                continue
            accuracy = trainer.evaluate()
            point = CurvePoint(
                update=done,
                num_tokens=done * config.batch_tokens,
                seconds=seconds_before + time.perf_counter() - began,
                step_losses=tuple(losses.tolist()),
                step_accept_rate=accuracy.step_accept_rate,
                accept_length=accuracy.accept_length,
                num_roots=accuracy.num_roots,
            )
            curve.append(point)
            if not quiet:
                progress.write(f"update {done}: {_in_words(point)}", file=sys.stderr)
            save_draft(trainer.draft, folder)
            save_state(folder, trainer.draft, trainer.optimizer, config, curve)
    return curve


def _in_words(point: CurvePoint) -> str:
    losses = " ".join(f"{loss:.3f}" for loss in point.step_losses)
    rates = " ".join(f"{rate:.3f}" for rate in point.step_accept_rate)
    return f"loss {losses} | accept rates {rates} | accept length {point.accept_length:.3f}"


class _Trainer:
    """The draft, its optimizer and the two losses."""

    def __init__(
        self,
        model: Any,  # noqa: ANN401  likewise
        rows: TextRows,
        config: TrainConfig,
    ) -> None:
        self.model, self.config = model, config
        self.device: torch.device = model.lm_head.weight.device
        self.rows, self.held_out = split_held_out(rows, config.held_out_rows)
        torch.manual_seed(config.seed)
        self.draft = _new_draft(model, config).to(self.device)
        self.capture = self.draft.config.hidden_state_indices(model.config.num_hidden_layers)
        matrices = [p for p in self.draft.parameters() if p.ndim > 1]
        vectors = [p for p in self.draft.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )
        steps = config.num_steps if config.kind == "eagle3" else 1
        weights = torch.tensor([config.step_decay**step for step in range(steps)])
        self.step_weights = (weights / weights.sum()).to(self.device)

    def batches(self, first: int) -> Iterator[tuple[int, TextBatch]]:
        """Numbered batches from update `first` on; each epoch has its own order."""
        update, epoch, ranks = 0, 0, num_ranks()
        while update < self.config.num_updates:
            seed = self.config.seed * 1000 + epoch
            plan = plan_batches(self.rows, batch_tokens=self.config.batch_tokens, seed=seed)
            for indices in plan:
                if len(indices) < ranks:
                    continue
                if first <= update < self.config.num_updates:
                    # Rows of one batch are alike in length, so no process waits for another.
                    mine = indices[current_rank() :: ranks]
                    yield update, load_batch(self.rows, mine, self.device)
                update += 1
            epoch += 1

    def update(self, update: int, batch: TextBatch) -> Tensor:
        """One optimizer step.

        Args:
            update: Its number, from 0.
            batch: What to learn from.

        Returns:
            [S] float32, mean cross entropy of each draft step, in nats.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(update, self.config)
        with self._autocast():
            if self.config.kind == "eagle3":
                loss, means = self._distribution_loss(batch)
            else:
                loss, means = self._feature_loss(batch, update)
        loss.backward()
        average_gradients(self.draft.parameters())
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return means

    def evaluate(self) -> ChainAccuracy:
        """Greedy chains on the held-out rows.

        Returns:
            The rates over all of them.
        """
        counts = torch.zeros(2, EVAL_STEPS, dtype=torch.int64, device=self.device)
        with self._autocast():
            for indices in plan_batches(self.held_out, batch_tokens=16384, seed=0):
                batch = load_batch(self.held_out, indices, self.device)
                counts += count_correct(self.draft, self.model, batch, EVAL_STEPS)
        return summarise_counts(counts)

    def _distribution_loss(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        states = capture_states(self.model, batch.tokens, self.capture)
        outputs = run_chain(self.draft, states.features, batch.tokens, self.config.num_steps)
        rows, where = batch.rows, batch.columns
        # Step k at index i predicts what the target's state at i + 1 + k predicts.
        head_inputs = torch.stack(
            [output.head_input[rows, where - 1 - step] for step, output in enumerate(outputs)]
        )
        return soft_cross_entropy(
            head_inputs, states.hidden[rows, where], self.draft.lm_head, self.step_weights
        )

    def _feature_loss(self, batch: TextBatch, update: int) -> tuple[Tensor, Tensor]:
        states = capture_states(self.model, batch.tokens, self.capture)
        generator = torch.Generator(self.device).manual_seed(
            (self.config.seed * 1_000_003 + update) * num_ranks() + current_rank()
        )
        noise = torch.rand(states.features.shape, generator=generator, device=self.device)
        features = states.features + (2 * noise - 1) * self.config.feature_noise
        output = run_chain(self.draft, features, batch.tokens, 1)[0]
        rows, where = batch.rows, batch.columns
        predicted, wanted = output.head_input[rows, where - 1], states.hidden[rows, where]
        regression = functional.smooth_l1_loss(predicted.float(), wanted.float())
        entropy, means = soft_cross_entropy(
            predicted[None], wanted, self.draft.lm_head, self.step_weights
        )
        return regression + self.config.head_weight * entropy, means

    def _autocast(self) -> torch.autocast:
        low_precision = self.draft.lm_head.dtype == torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=low_precision)


def learning_rate(update: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine from the peak to a twentieth of it.

    Args:
        update: Updates done before this one.
        config: Gives peak, warm-up and length.

    Returns:
        The rate of this update.
    """
    if update < config.warmup:
        return config.learning_rate * (update + 1) / config.warmup
    share = (update - config.warmup) / max(1, config.num_updates - config.warmup)
    return config.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))


def _new_draft(model: Any, config: TrainConfig) -> Draft:  # noqa: ANN401  likewise
    draft = build_draft(
        draft_config_for(
            model.config, kind=config.kind, intermediate_size=config.intermediate_size
        ),
        embed_tokens=model.model.embed_tokens.weight.detach(),
        lm_head=model.lm_head.weight.detach(),
    )
    if isinstance(draft, Eagle3Draft):
        # The head is the target's, so its input starts at the scale that the target gives it.
        draft.norm.weight.data.copy_(model.model.norm.weight.detach())
    return draft
