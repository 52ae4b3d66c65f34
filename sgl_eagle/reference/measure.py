"""Run several policies over the same prompts, side by side, so that noise hits them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from sgl_eagle.reference.decode import Engine, Generation, StepRecord
from sgl_eagle.reference.pair import Pair
from sgl_eagle.reference.prompts import Prompt
from sgl_eagle.reference.sampling_config import GREEDY, Sampling
from sgl_eagle_harness.errors import PromptError
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_tuner.prompt_totals import PromptTotals

Name = TypeVar("Name", bound=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as the engine takes it.

    Attributes:
        id: Unique name.
        workload: Workload key.
        tokens: Token ids in the target's chat template.
    """

    id: str
    workload: str
    tokens: tuple[int, ...]


def encode_prompts(
    pair: Pair, prompts: Sequence[Prompt], *, max_new_tokens: int
) -> list[EncodedPrompt]:
    """Put the first turn of every prompt into the target's chat template.

    Args:
        pair: Knows the template.
        prompts: What users ask.
        max_new_tokens: Completion length at most.

    Returns:
        The prompts as the engine takes them.

    Raises:
        PromptError: If a prompt with its completion is too long for the target; names the prompt.
    """
    longest = pair.target.dims.max_positions
    encoded = []
    for prompt in prompts:
        tokens = pair.encode(prompt.turns[0])
        if len(tokens) >= longest:
            raise PromptError(
                f"prompt {prompt.id!r} has {len(tokens)} tokens, but this target has only "
                f"{longest} positions, the answer included"
            )
        if len(tokens) + max_new_tokens > longest:
            raise PromptError(
                f"prompt {prompt.id!r} has {len(tokens)} tokens, so that on this target of "
                f"{longest} positions max_new_tokens must be at most {longest - len(tokens)}, got "
                f"{max_new_tokens}"
            )
        encoded.append(EncodedPrompt(id=prompt.id, workload=prompt.workload, tokens=tokens))
    return encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One policy on some prompts.

    Attributes:
        prompts: The prompts.
        generations: One for each prompt; of repeated runs, the one of median decode time.
    """

    prompts: tuple[EncodedPrompt, ...]
    generations: tuple[Generation, ...]

    @property
    def steps(self) -> list[StepRecord]:
        """All steps of all prompts."""
        return [step for generation in self.generations for step in generation.steps]

    @property
    def totals(self) -> PromptTotals:
        """Tokens, target passes and time by prompt; prefill and its token left out."""
        return PromptTotals(
            prompt_ids=tuple(prompt.id for prompt in self.prompts),
            num_tokens=np.array([run.num_decode_tokens for run in self.generations]),
            num_verifies=np.array([len(run.steps) for run in self.generations]),
            elapsed_us=np.array([run.decode_us for run in self.generations]),
        )


def measure_policies(
    engine: Engine,
    prompts: Sequence[EncodedPrompt],
    policies: Mapping[Name, SpecPolicy],
    *,
    max_new_tokens: int,
    stop_tokens: frozenset[int],
    on_run: Callable[[], None],
    sampling: Sampling = GREEDY,
    num_repeats: int = 1,
) -> dict[Name, Measured]:
    """Decode every prompt with every policy, prompt by prompt, in an order that rotates.

    A slow minute of the machine then slows all policies, not one. The first prompt is decoded once
    more beforehand, with all policies, so that nobody pays for warming up.

    Args:
        engine: Target and draft.
        prompts: At least one.
        policies: Name to policy.
        max_new_tokens: Completion length at most.
        stop_tokens: Ids that end a completion.
        on_run: Called after each of the `len(prompts) * len(policies) * num_repeats` runs.
        sampling: How the target chooses.
        num_repeats: Runs of each; the one of median decode time counts.

    Returns:
        Name to what was measured.
    """

    def run(name: Name, prompt: EncodedPrompt, length: int) -> Generation:
        return engine.generate(
            list(prompt.tokens),
            policies[name],
            max_new_tokens=length,
            stop_tokens=stop_tokens,
            sampling=sampling,
        )

    names = list(policies)
    for name in names:
        run(name, prompts[0], min(max_new_tokens, 16))
    runs: dict[Name, list[Generation]] = {name: [] for name in names}
    for index, prompt in enumerate(prompts):
        repeats: dict[Name, list[Generation]] = {name: [] for name in names}
        for repeat in range(num_repeats):
            shift = (index + repeat) % len(names)
            for name in names[shift:] + names[:shift]:
                repeats[name].append(run(name, prompt, max_new_tokens))
                on_run()
        for name, same in repeats.items():
            runs[name].append(sorted(same, key=lambda each: each.decode_us)[len(same) // 2])
    return {
        name: Measured(prompts=tuple(prompts), generations=tuple(same))
        for name, same in runs.items()
    }
