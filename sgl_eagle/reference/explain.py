"""What explains a difference between two runs: rounding, where a control shows it, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_eagle.reference.comparison import UnequalStep, first_difference
from sgl_eagle.reference.control import (
    Rerun,
    engine_passes,
    even_passes,
    redraft_steps,
    rerun_text,
)
from sgl_eagle.reference.decode import Generation
from sgl_eagle.reference.draft_models import Draft
from sgl_eagle.reference.target import Target
from sgl_eagle_harness.policies.protocol import SpecPolicy

CONTROL_SIZES = (2, 4, 8, 16, 32)
"""Tokens a pass of the controls, besides the engine's own passes without their trees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDifference:
    """Where a policy's greedy text leaves that of plain decoding.

    Attributes:
        prompt_id: Prompt.
        position: Index in the completion of the first different token.
        gap: Logit of the plain token less that of the policy's, in passes of one token: what had
            to be crossed. None if one text ends where the other goes on, which is no choice.
        moved: How far the controls move that gap at most, in either direction.
    """

    prompt_id: str
    position: int
    gap: float | None
    moved: float

    @property
    def explained(self) -> bool:
        """Rounding alone moves the two logits far enough at this very position."""
        return self.gap is not None and self.moved >= self.gap


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """A step that accepted another number of tokens than its replay.

    Attributes:
        prompt_id: Prompt.
        position: Index in the completion of the first token that the step emitted.
        num_accept_tokens: As the engine ran it, bonus token included.
        num_replayed: As replayed.
        controls: Tokens that the step emits when drafted from the features of each control.
    """

    prompt_id: str
    position: int
    num_accept_tokens: int
    num_replayed: int
    controls: tuple[int, ...]

    @property
    def explained(self) -> bool:
        """Features of some pass without a tree make the draft do what it did in the engine."""
        return self.num_accept_tokens in self.controls


class PromptControl:
    """Reruns of one prompt's plain text, made when they are needed and shared by all policies."""

    def __init__(self, target: Target, draft: Draft, plain: Generation, prompt_id: str) -> None:
        """Take what is to be controlled.

        Args:
            target: Target model.
            draft: Draft model.
            plain: Greedy run of plain decoding.
            prompt_id: For the findings.
        """
        self._target = target
        self._draft = draft
        self._plain = plain
        self._prompt_id = prompt_id
        self._even: dict[int, Rerun] = {}

    def explain_run(
        self, run: Generation, policy: SpecPolicy, unequal: Sequence[UnequalStep]
    ) -> tuple[TextDifference | None, tuple[StepDifference, ...]]:
        """Hold a policy's run of the prompt against its controls.

        Args:
            run: Greedy run.
            policy: What it was decoded with.
            unequal: Its steps that differ from their replay, all before the texts part.

        Returns:
            Where its text leaves the plain one, None where it does not; and its unequal steps.
        """
        position = first_difference(self._plain.tokens, run.tokens)
        if position is None and not unequal:
            return None, ()
        own = rerun_text(self._target, run.prompt, run.tokens, engine_passes(run))
        difference = None if position is None else self._text_difference(run, own, position)
        return difference, self._step_differences(run, own, policy, unequal)

    def _text_difference(self, run: Generation, own: Rerun, position: int) -> TextDifference:
        if position >= min(len(self._plain.tokens), len(run.tokens)):
            return TextDifference(prompt_id=self._prompt_id, position=position, gap=None, moved=0.0)
        chosen, instead = self._plain.tokens[position], run.tokens[position]

        def gap(rerun: Rerun) -> float:
            logits = rerun.logits[position]
            return float(logits[chosen]) - float(logits[instead])

        plain = gap(self._rerun_evenly(1))
        controls = [own, *(self._rerun_evenly(size) for size in CONTROL_SIZES)]
        return TextDifference(
            prompt_id=self._prompt_id,
            position=position,
            gap=plain,
            moved=max(abs(gap(control) - plain) for control in controls),
        )

    def _step_differences(
        self, run: Generation, own: Rerun, policy: SpecPolicy, unequal: Sequence[UnequalStep]
    ) -> tuple[StepDifference, ...]:
        if not unequal:
            return ()
        controls = [
            redraft_steps(
                self._draft,
                rerun,
                run,
                policy,
                text=self._plain.tokens,
                positions={step.position for step in unequal},
            )
            for rerun in (own, *(self._rerun_evenly(size) for size in (1, *CONTROL_SIZES)))
        ]
        return tuple(
            StepDifference(
                prompt_id=self._prompt_id,
                position=step.position,
                num_accept_tokens=step.num_accept_tokens,
                num_replayed=step.num_replayed,
                controls=tuple(control[step.position] for control in controls),
            )
            for step in unequal
        )

    def _rerun_evenly(self, size: int) -> Rerun:
        if size not in self._even:
            plain = self._plain
            passes = even_passes(len(plain.tokens), size)
            self._even[size] = rerun_text(self._target, plain.prompt, plain.tokens, passes)
        return self._even[size]
