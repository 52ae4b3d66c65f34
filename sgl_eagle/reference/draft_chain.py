"""Draft steps along known text: what training-time test and evaluation both run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sgl_eagle.reference.chain_attention import attend_rows_and_chain
from sgl_eagle.reference.draft_models import Draft, Output
from sgl_eagle.reference.train_data import TextBatch

HEAD_CHUNK = 8192


class TargetStates(NamedTuple):
    """What a draft takes from the target.

    Attributes:
        features: [B, T, F], captured layers concatenated.
        hidden: [B, T, H] after the final norm; the head turns it into logits of the next token.
    """

    features: Tensor
    hidden: Tensor


@dataclass(frozen=True, kw_only=True)
class ChainAccuracy:
    """How far chains of most probable drafts agree with the target, from every root of an answer.

    Attributes:
        step_accept_rate: For each draft step, the share of drafts that the target keeps, given that
            it kept the steps before.
        accept_length: 1 plus the sum of the products of `step_accept_rate`, bonus token included.
        num_roots: Roots of the first step.
    """

    step_accept_rate: tuple[float, ...]
    accept_length: float
    num_roots: int


@torch.no_grad()
def capture_states(
    model: Any,  # noqa: ANN401  every family has its own class
    tokens: Tensor,
    indices: tuple[int, ...],
) -> TargetStates:
    """Run the target over whole rows.

    Rows are padded at their end, which causal attention never sees: no mask is needed.

    Args:
        model: Hugging Face causal language model.
        tokens: [B, T] int64.
        indices: Hidden states to capture, as `DraftConfig.hidden_state_indices` gives them.

    Returns:
        Features and final hidden states, in the target's dtype.
    """
    output = model.model(tokens, use_cache=False, output_hidden_states=True)
    captured = [output.hidden_states[index] for index in indices]
    return TargetStates(torch.cat(captured, dim=-1), output.last_hidden_state)


def run_chain(draft: Draft, features: Tensor, tokens: Tensor, num_steps: int) -> list[Output]:
    """Draft `num_steps` steps from every position at once, fed with the true text.

    Step k at index i embeds token i + 1 + k, has position i + k, sees the step-0 entries up to i
    and its own chain, and predicts token i + 2 + k; that is what a draft does whose first k
    proposals were right. Indices whose tokens lie past the end of the row give values without
    meaning.

    Args:
        draft: Any draft.
        features: [B, T, F] of the target.
        tokens: [B, T] int64.
        num_steps: S.

    Returns:
        For each step the outputs [B, T, H].
    """
    length = tokens.shape[1]
    following = functional.pad(tokens, (0, num_steps))
    positions = torch.arange(length, device=tokens.device).expand_as(tokens)
    hidden = draft.fuse(features)
    outputs: list[Output] = []
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for step in range(num_steps):
        token_ids = following[:, 1 + step : 1 + step + length]
        q, k, v, residual = draft.project(hidden, token_ids, positions + step)
        keys.append(k)
        values.append(v)
        attention = attend_rows_and_chain(q, keys[0], values[0], keys[1:], values[1:])
        outputs.append(draft.finish(attention, residual))
        hidden = outputs[-1].feedback
    return outputs


@torch.no_grad()
def count_correct(
    draft: Draft,
    model: Any,  # noqa: ANN401  likewise
    batch: TextBatch,
    num_steps: int,
) -> Tensor:
    """Chains kept by a greedy target, counted over the roots of each answer.

    Args:
        draft: Any draft.
        model: Target.
        batch: Rows at temperature 0, so that their text is what the target would choose.
        num_steps: Draft steps.

    Returns:
        [2, S] int64: chains that reached each step within the recorded text, and those of them
        whose draft was right.
    """
    config = draft.config
    indices = config.hidden_state_indices(model.config.num_hidden_layers)
    states = capture_states(model, batch.tokens, indices)
    outputs = run_chain(draft, states.features, batch.tokens, num_steps)
    rows = batch.rows
    index = batch.columns - 1  # what the target predicts at a column, a draft does one before
    alive = torch.ones_like(rows, dtype=torch.bool)
    counts = torch.zeros(2, num_steps, dtype=torch.int64, device=rows.device)
    for step, output in enumerate(outputs):
        alive = alive & (index + 2 + step < batch.answer_end[rows])
        drafted = _most_probable(draft, output.head_input[rows, index])
        column = (index + 2 + step).clamp(max=batch.tokens.shape[1] - 1)
        correct = alive & (drafted == batch.tokens[rows, column])
        counts[0, step] = alive.sum()
        counts[1, step] = correct.sum()
        alive = correct
    return counts


def summarise_counts(counts: Tensor) -> ChainAccuracy:
    """Rates from counts.

    Args:
        counts: [2, S] sum of `count_correct`.

    Returns:
        The rates.
    """
    reached, correct = counts.tolist()
    rates = tuple(
        right / tried if tried else 0.0 for tried, right in zip(reached, correct, strict=True)
    )
    accept_length, product = 1.0, 1.0
    for rate in rates:
        product *= rate
        accept_length += product
    return ChainAccuracy(
        step_accept_rate=rates, accept_length=accept_length, num_roots=int(reached[0])
    )


def _most_probable(draft: Draft, head_input: Tensor) -> Tensor:
    chunks = head_input.to(draft.lm_head.dtype).split(HEAD_CHUNK)
    return draft.to_target_ids(torch.cat([draft.head(chunk).argmax(dim=-1) for chunk in chunks]))
