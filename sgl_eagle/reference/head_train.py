"""Train the factors of a draft's LM head; draft and full head stay frozen.

The low-rank head learns to give the full head's distribution at every draft step: the loss is the
Kullback-Leibler divergence from the full head's softmax to its own, in nats. It starts from the
nearest factors in the norm of `head_factors`, measured on the first batches of the same text.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from sgl_eagle.reference.draft_chain import capture_states, run_chain
from sgl_eagle.reference.draft_models import Draft
from sgl_eagle.reference.generate_text import TextRows
from sgl_eagle.reference.head_factors import HeadFactors, factorize_head, smooth_frequencies
from sgl_eagle.reference.head_train_state import HeadCurvePoint, HeadTrainFolder
from sgl_eagle.reference.train_data import load_batch, plan_batches, split_held_out
from sgl_eagle_harness.errors import SglEagleError

LOSS_ROWS = 4096
"""Rows of logits in flight: about 5 GB on a GPU at 49,152 tokens."""


@dataclass(frozen=True, kw_only=True)
class HeadTrainConfig:
    """How to train factors.

    Attributes:
        rank: R.
        num_updates: Optimizer steps.
        batch_tokens: Tokens of text of one update, padding included.
        learning_rate: Peak of Adam's, reached after a twentieth of the updates; a cosine takes it
            to a twentieth.
        num_steps: Draft steps learnt from.
        start_batches: Batches of text that the starting factors are fitted to.
        candidates: Tokens of the low-rank head among which evaluation looks for the full head's
            best one.
        held_out_rows: Rows evaluated on.
        eval_every: Updates between evaluations and between resumable states.
        seed: Of the order of batches.
    """

    rank: int = 128
    num_updates: int = 1000
    batch_tokens: int = 8192
    learning_rate: float = 1e-3
    num_steps: int = 5
    start_batches: int = 16
    candidates: int = 256
    held_out_rows: int = 64
    eval_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rank", "num_updates", "batch_tokens", "num_steps", "start_batches"):
            if getattr(self, name) < 1:
                raise SglEagleError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.learning_rate < 1:
            raise SglEagleError(f"learning_rate must be in (0, 1), got {self.learning_rate}")


class HeadDistance(NamedTuple):
    """How far a low-rank head is from the full head.

    Attributes:
        step_kl: Of each draft step, mean divergence in nats.
        recall: Share of rows whose most probable token by the full head is among the candidates.
    """

    step_kl: tuple[float, ...]
    recall: float


def train_factors(
    model: Any,  # noqa: ANN401  every family has its own class
    draft: Draft,
    rows: TextRows,
    config: HeadTrainConfig,
    folder: HeadTrainFolder,
    *,
    resume: bool = False,
    quiet: bool = False,
) -> tuple[HeadFactors, list[HeadCurvePoint]]:
    """Train factors and keep their curve and a resumable state.

    Args:
        model: Hugging Face target on its device.
        draft: Its draft, on the same device.
        rows: Text the target wrote.
        config: How to train.
        folder: Gets curve and state after every evaluation.
        resume: Go on from the folder's state instead of starting anew.
        quiet: Show no progress.

    Returns:
        The factors in float32; and the evaluations, the first before any update.

    Raises:
        SglEagleError: If the rank is above the head's width.
    """
    trainer = _HeadTrainer(model, draft, rows, config)
    if resume:
        curve = folder.load(trainer.factors, trainer.optimizer, config)
    else:
        curve = [trainer.measure(0, 0.0)]
    first, seconds_before = curve[-1].update, curve[-1].seconds
    began = time.perf_counter()
    with tqdm(
        total=config.num_updates, initial=first, desc="train factors", disable=quiet
    ) as progress:
        for update, states in trainer.batches(first):
            trainer.update(update, states)
            progress.update()
            done = update + 1
            if done % config.eval_every and done != config.num_updates:
                continue
            curve.append(trainer.measure(done, seconds_before + time.perf_counter() - began))
            if not quiet:
                progress.write(_in_words(curve[-1]), file=sys.stderr)
            folder.save(trainer.factors, trainer.optimizer, config, curve)
    up, down = (parameter.detach() for parameter in trainer.factors)
    return HeadFactors(up, down), curve


def _in_words(point: HeadCurvePoint) -> str:
    divergences = " ".join(f"{kl:.3f}" for kl in point.step_kl)
    return f"update {point.update}: divergence {divergences} | recall {point.recall:.4f}"


class _HeadTrainer:
    """The factors, their optimizer, and the text that they learn from."""

    def __init__(
        self,
        model: Any,  # noqa: ANN401  likewise
        draft: Draft,
        rows: TextRows,
        config: HeadTrainConfig,
    ) -> None:
        if config.rank > draft.lm_head.shape[1]:
            raise SglEagleError(
                f"rank must be in [1, {draft.lm_head.shape[1]}], the width of the head, got "
                f"{config.rank}"
            )
        self.model, self.draft, self.config = model, draft, config
        self.device = draft.lm_head.device
        self.capture = draft.config.hidden_state_indices(model.config.num_hidden_layers)
        self.rows, held_out = split_held_out(rows, config.held_out_rows)
        plan = plan_batches(held_out, batch_tokens=config.batch_tokens, seed=0)
        self.held_out = [self._states(held_out, indices) for indices in plan]
        start = self._start()
        self.factors = HeadFactors(*(tensor.clone().requires_grad_() for tensor in start))
        self.optimizer = torch.optim.Adam(
            list(self.factors),
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )

    def batches(self, first: int) -> Iterator[tuple[int, Tensor]]:
        """Numbered batches of head inputs [S, N, H] from update `first` on."""
        numbered = enumerate(self._plan())
        for update, indices in islice(numbered, first, self.config.num_updates):
            yield update, self._states(self.rows, indices)

    def _plan(self) -> Iterator[Tensor]:
        epoch = 0
        while True:  # each epoch has its own order
            seed = self.config.seed * 1000 + epoch
            yield from plan_batches(self.rows, batch_tokens=self.config.batch_tokens, seed=seed)
            epoch += 1

    def _start(self) -> HeadFactors:
        # The first batches of training say which tokens and which directions matter.
        weight = self.draft.lm_head
        hidden = weight.shape[1]
        moment = torch.zeros(hidden, hidden, dtype=torch.float64, device=self.device)
        counts = torch.zeros(weight.shape[0], dtype=torch.int64, device=self.device)
        num_rows = 0
        for indices in islice(self._plan(), self.config.start_batches):
            inputs = self._states(self.rows, indices).flatten(0, 1)
            for chunk in inputs.split(LOSS_ROWS):
                counts += torch.bincount(self.draft.head(chunk).argmax(-1), minlength=len(counts))
            moment += inputs.double().T @ inputs.double()
            num_rows += len(inputs)
        projection = factorize_head(
            weight,
            self.config.rank,
            frequencies=smooth_frequencies(counts, 1.0),
            second_moment=moment / num_rows,
        )
        return projection.apply(weight)

    @torch.no_grad()
    def _states(self, rows: TextRows, indices: Tensor) -> Tensor:
        # [S, N, H]: what the head reads where it predicts the tokens of the answers.
        batch = load_batch(rows, indices, self.device)
        features = capture_states(self.model, batch.tokens, self.capture).features
        outputs = run_chain(self.draft, features, batch.tokens, self.config.num_steps)
        where = batch.columns - 1
        # An answer's first tokens have no room for the later steps of a chain before them.
        inside = where >= len(outputs) - 1
        where, which = where[inside], batch.rows[inside]
        states = [output.head_input[which, where - step] for step, output in enumerate(outputs)]
        return torch.stack(states).to(self.draft.lm_head.dtype)

    def update(self, update: int, states: Tensor) -> None:
        """One optimizer step.

        Args:
            update: Its number, from 0.
            states: [S, N, H].
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(update, self.config)
        inputs = states.flatten(0, 1)
        for chunk in inputs.split(LOSS_ROWS):
            loss = divergence(chunk, self.draft.lm_head, self.factors).sum() / len(inputs)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def measure(self, update: int, seconds: float) -> HeadCurvePoint:
        """Evaluate on the held-out rows.

        Args:
            update: Updates done.
            seconds: Time so far.

        Returns:
            The point of the curve.
        """
        distance = measure_distance(
            self.draft.lm_head, self.factors, self.held_out, candidates=self.config.candidates
        )
        return HeadCurvePoint(
            update=update,
            seconds=seconds,
            step_kl=distance.step_kl,
            recall=distance.recall,
            num_rows=sum(states.shape[0] * states.shape[1] for states in self.held_out),
        )


def divergence(inputs: Tensor, weight: Tensor, factors: HeadFactors) -> Tensor:
    """Divergence from the full head's distribution to the low-rank head's.

    Args:
        inputs: [n, H] in the dtype of the head.
        weight: [V, H] full head.
        factors: Float32; gradients flow into them.

    Returns:
        [n] float32, nats.
    """
    with torch.no_grad():
        wanted = functional.linear(inputs, weight).float().log_softmax(-1)
    found = _low_rank_logits(inputs, factors).log_softmax(-1)
    return functional.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)


def _low_rank_logits(inputs: Tensor, factors: HeadFactors) -> Tensor:
    up, down = (tensor.to(inputs.dtype) for tensor in factors)
    return functional.linear(functional.linear(inputs, down), up).float()


@torch.no_grad()
def measure_distance(
    weight: Tensor, factors: HeadFactors, batches: list[Tensor], *, candidates: int
) -> HeadDistance:
    """Compare a low-rank head with the full one.

    Args:
        weight: [V, H] full head.
        factors: Of that head.
        batches: Head inputs, [S, N, H] each.
        candidates: C, as in `HeadTrainConfig`.

    Returns:
        Means over all rows.
    """
    num_steps = batches[0].shape[0]
    sums = torch.zeros(num_steps, device=weight.device)
    num_found = num_rows = 0
    for states in batches:
        for step, inputs in enumerate(states):
            for chunk in inputs.split(LOSS_ROWS):
                sums[step] += divergence(chunk, weight, factors).sum()
                best = functional.linear(chunk, weight).argmax(-1)
                kept = min(candidates, weight.shape[0])
                chosen = _low_rank_logits(chunk, factors).topk(kept, dim=-1).indices
                num_found += int((chosen == best[:, None]).sum())
        num_rows += states.shape[1]
    return HeadDistance(tuple((sums / num_rows).tolist()), num_found / (num_rows * num_steps))


def learning_rate(update: int, config: HeadTrainConfig) -> float:
    """Linear warm-up over a twentieth of the updates, then a cosine to a twentieth of the peak.

    Args:
        update: Updates done before this one.
        config: Gives peak and length.

    Returns:
        The rate of this update.
    """
    warmup = max(1, config.num_updates // 20)
    if update < warmup:
        return config.learning_rate * (update + 1) / warmup
    share = (update - warmup) / max(1, config.num_updates - warmup)
    return config.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))
