"""Inputs of a draft's head on text of the target: what heads are fitted to and judged by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_eagle.reference.draft_chain import run_chain
from sgl_eagle.reference.pair import Pair
from sgl_eagle.reference.prompts import Prompt
from sgl_eagle.reference.record import decode_texts
from sgl_eagle.reference.sampling_config import GREEDY

DECODED_TOGETHER = 8
"""Prompts answered in lock step: a row more costs little, a pass over the weights much."""


class HeadStates(NamedTuple):
    """Chains of `num_steps` drafts along the text, one from every root inside an answer.

    Attributes:
        inputs: [S, N, H] what the head turns into logits at each draft step.
        next_tokens: [S, N] int64, the token that follows in the text; -1 past its end.
    """

    inputs: Tensor
    next_tokens: Tensor


@torch.inference_mode()
def collect_head_states(
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    num_steps: int,
    on_tokens: Callable[[int], None],
) -> HeadStates:
    """Let the target answer, and run the draft along every answer.

    Args:
        pair: Target and draft.
        prompts: Their first turns are answered at temperature 0.
        max_new_tokens: Length of an answer at most.
        num_steps: S.
        on_tokens: Called with the number of new tokens.

    Returns:
        States of all answers, in the order of the prompts.
    """
    parts = []
    for start in range(0, len(prompts), DECODED_TOGETHER):
        group = [
            pair.encode(prompt.turns[0]) for prompt in prompts[start : start + DECODED_TOGETHER]
        ]
        answers: list[tuple[int, ...]] = [() for _ in group]
        for newest in decode_texts(
            pair.target,
            group,
            max_new_tokens=max_new_tokens,
            stop_tokens=pair.stop_tokens,
            sampling=GREEDY,
        ):
            on_tokens(sum(map(len, newest)) - sum(map(len, answers)))
            answers = newest
        parts += [
            _along_text(pair, prompt, answer, num_steps)
            for prompt, answer in zip(group, answers, strict=True)
        ]
    return HeadStates(*(torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True)))


def _along_text(
    pair: Pair, prompt: tuple[int, ...], answer: tuple[int, ...], num_steps: int
) -> HeadStates:
    tokens = torch.tensor([*prompt, *answer], device=pair.target.device)
    cache = pair.target.make_cache(len(tokens))
    features = pair.target.forward(tokens[None], cache=cache, start=0).features
    outputs = run_chain(pair.draft, features, tokens[None], num_steps)
    # Index i predicts token i + 2 at the first step: the first root is the last prompt token.
    first = len(prompt) - 2
    roots = slice(first, first + len(answer))
    following = torch.cat([tokens, tokens.new_full((num_steps,), -1)])
    return HeadStates(
        torch.stack([output.head_input[0, roots] for output in outputs]),
        torch.stack([following[first + 2 + step :][: len(answer)] for step in range(len(outputs))]),
    )
