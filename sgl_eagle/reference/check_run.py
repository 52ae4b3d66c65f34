"""A smoke run: what a draft is worth shows only when it drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sgl_eagle.reference.check_row import CheckRow, failed, ok, warning
from sgl_eagle.reference.decode import Engine, StepRecord
from sgl_eagle.reference.explain import PromptControl, tokens_needed
from sgl_eagle.reference.measure import EncodedPrompt, Measured, measure_policies
from sgl_eagle.reference.pair import Pair
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.policies.plain import PlainPolicy
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.types import TreeLimits

LOW_ACCEPT_LENGTH = 1.3
"""Below it hardly a draft is accepted; published EAGLE heads stay above 2 on their own targets."""

LOW_COVERAGE = 0.9
"""Published reduced vocabularies cover more of ordinary text than this."""

NUM_RUNS = 2
"""Runs of each prompt: plain and speculative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeRun:
    """The same prompts decoded plainly and with the draft, at temperature 0.

    Attributes:
        pair: What ran.
        limits: The draft's trees.
        plain: Plain decoding.
        speculative: EAGLE-2 trees.
    """

    pair: Pair
    limits: TreeLimits
    plain: Measured
    speculative: Measured


def run_smoke(
    pair: Pair,
    prompts: Sequence[EncodedPrompt],
    limits: TreeLimits,
    *,
    max_new_tokens: int,
    on_run: Callable[[], None],
) -> SmokeRun:
    """Decode some prompts both ways.

    Args:
        pair: Target and draft.
        prompts: At least one.
        limits: The draft's trees.
        max_new_tokens: Completion length at most.
        on_run: Called after each of the `NUM_RUNS * len(prompts)` runs.

    Returns:
        Both runs.
    """
    policies: dict[str, SpecPolicy] = {
        "plain": PlainPolicy(),
        "speculative": Eagle2Policy(limits=limits),
    }
    measured = measure_policies(
        Engine(pair.target, pair.draft),
        prompts,
        policies,
        max_new_tokens=max_new_tokens,
        stop_tokens=pair.stop_tokens,
        on_run=on_run,
    )
    return SmokeRun(pair=pair, limits=limits, **measured)


def judge_smoke(run: SmokeRun) -> list[CheckRow]:
    """Judge a smoke run.

    Args:
        run: Both runs.

    Returns:
        Coverage of the draft's vocabulary, accept length, equality of the texts.
    """
    return [_coverage(run), _accept_length(run), _texts(run)]


def _coverage(run: SmokeRun) -> CheckRow:
    name = "draft vocabulary"
    mapping = run.pair.draft.draft_to_target
    if mapping is None:
        return ok(name, "all of the target's tokens")
    text = np.concatenate([generation.tokens for generation in run.plain.generations])
    share = float(np.isin(text, mapping.cpu().numpy()).mean())
    found = f"{len(mapping)} tokens, which cover {share:.1%} of {len(text)} tokens of text"
    if share < LOW_COVERAGE:
        return warning(
            name,
            found,
            "every token that is not covered ends a draft: train on a vocabulary counted on text "
            "like yours",
        )
    return ok(name, found)


def _accept_length(run: SmokeRun) -> CheckRow:
    name = "accept length"
    steps = run.speculative.steps
    if not steps:
        return warning(
            name,
            "not measured: every completion ended with its first token",
            "give other prompts with --prompts",
        )
    accept_length = run.speculative.totals.accept_length
    most = min(run.limits.num_steps, run.limits.num_draft_tokens - 1) + 1
    found = (
        f"{accept_length:.2f} tokens a step, bonus token included, of at most {most}; "
        f"{len(steps)} steps, {len(run.plain.prompts)} prompts"
    )
    if all(step.num_accept_tokens == 1 for step in steps):
        return failed(
            name,
            f"{found}: no draft was ever accepted",
            "look at the rows above: wrong capture layers, untrained or missing weights, a wrong "
            "d2t or another target do this",
        )
    whole = [step for step, left in _with_room(run) if left >= most]
    if whole and all(step.num_accept_tokens == most for step in whole):
        return warning(
            name,
            f"{found}: every draft was accepted",
            "read the target's text: it repeats itself, or its logits are broken",
        )
    if accept_length < LOW_ACCEPT_LENGTH:
        return warning(
            name,
            f"{found}: hardly better than none",
            "look at the rows above, or train the draft for longer",
        )
    return ok(name, found)


def _with_room(run: SmokeRun) -> list[tuple[StepRecord, int]]:
    return [
        (step, len(generation.tokens) - step.position)
        for generation in run.speculative.generations
        for step in generation.steps
    ]


def _texts(run: SmokeRun) -> CheckRow:
    name = "greedy text"
    policy = Eagle2Policy(limits=run.limits)
    pair = run.pair
    differences = []
    for prompt, plain, speculative in zip(
        run.plain.prompts, run.plain.generations, run.speculative.generations, strict=True
    ):
        control = PromptControl(
            pair.target,
            pair.draft,
            plain,
            num_tokens=tokens_needed(plain, speculative, []),
            prompt_id=prompt.id,
        )
        difference, _ = control.explain_run(speculative, policy, [])
        differences += [] if difference is None else [difference]
    unexplained = [each for each in differences if not each.explained]
    num_prompts = len(run.plain.prompts)
    found = (
        f"{num_prompts - len(differences)} of {num_prompts} equal plain decoding, "
        f"{len(differences) - len(unexplained)} differ where rounding moves the logits as far"
    )
    if unexplained:
        return failed(
            name,
            f"{found}, {len(unexplained)} differ where it does not "
            f"(first: {unexplained[0].prompt_id}, token {unexplained[0].position})",
            "a defect of the engine, not of the draft: please report it with this output",
        )
    return ok(name, found)
