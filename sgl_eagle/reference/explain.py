"""What explains a difference between two runs: rounding, where a control shows it, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sgl_eagle.reference.comparison import UnequalStep, first_difference
from sgl_eagle.reference.control import (
    Redraft,
    Rerun,
    engine_passes,
    even_passes,
    redraft_steps,
    rerun_text,
)
from sgl_eagle.reference.decode import Generation
from sgl_eagle.reference.draft_models import Draft
from sgl_eagle.reference.leaning import LeaningDrafter, measure_moves
from sgl_eagle.reference.target import Target
from sgl_eagle_harness.draft_loop import Drafter
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.types import FloatArray

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
        rounding: Unit in the last place of the larger logit. Each of the two is rounded to half
            of it, so that much of the gap, or of a movement, may not be there before rounding.
    """

    prompt_id: str
    position: int
    gap: float | None
    moved: float
    rounding: float

    @property
    def explained(self) -> bool:
        """Rounding alone moves the two logits far enough at this very position."""
        return self.gap is not None and self.moved + self.rounding >= self.gap


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference(UnequalStep):
    """An unequal step, and how far rounding could have made it so.

    Attributes:
        controls: Tokens that the step emits when drafted from the features of each control.
        moved: How far the controls move a node's log path confidence at most.
        fewest: Tokens emitted if all scores move that far, depth by depth, against the text.
        most: The same in its favour.
    """

    controls: tuple[int, ...]
    moved: float
    fewest: int
    most: int

    @property
    def reproduced(self) -> bool:
        """Features of some pass without a tree make the draft do what it did in the engine."""
        return self.num_accept_tokens in self.controls

    @property
    def explained(self) -> bool:
        """The policy's decision hangs on less than what rounding moves the draft's scores."""
        return self.reproduced or self.fewest <= self.num_accept_tokens <= self.most


def tokens_needed(plain: Generation, run: Generation, unequal: Sequence[UnequalStep]) -> int:
    """How much of the plain text must be read again to explain a run.

    Args:
        plain: Greedy run of plain decoding.
        run: Greedy run of a policy.
        unequal: Its steps that differ from their replay.

    Returns:
        Tokens of the completion; 0 if there is nothing to explain.
    """
    parting = first_difference(plain.tokens, run.tokens)
    ends = [step.position for step in unequal]
    return max([0, *ends] if parting is None else [parting + 1, *ends])


def last_place(numbers: Tensor) -> float:
    """The unit in the last place of the largest number.

    Args:
        numbers: Finite numbers of any floating dtype.

    Returns:
        Distance of the largest magnitude to the next one that the dtype holds.
    """
    largest = numbers.abs().max()
    return float(torch.nextafter(largest, largest.new_tensor(torch.inf)) - largest)


class PromptControl:
    """Reruns of one prompt's plain text, made when they are needed and shared by all policies."""

    def __init__(
        self, target: Target, draft: Draft, plain: Generation, *, num_tokens: int, prompt_id: str
    ) -> None:
        """Take what is to be controlled.

        Args:
            target: Target model.
            draft: Draft model.
            plain: Greedy run of plain decoding.
            num_tokens: Tokens of its completion to read again, at least `tokens_needed` of every
                run that is to be explained.
            prompt_id: For the findings.
        """
        self._target = target
        self._draft = draft
        self._plain = plain
        self._num_tokens = num_tokens
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
        needed = tokens_needed(self._plain, run, unequal)
        own = rerun_text(self._target, run.prompt, run.tokens[:needed], engine_passes(run))
        difference = None if position is None else self._text_difference(run, own, position)
        return difference, self._step_differences(run, own, policy, unequal)

    def _text_difference(self, run: Generation, own: Rerun, position: int) -> TextDifference:
        if position >= min(len(self._plain.tokens), len(run.tokens)):
            return TextDifference(
                prompt_id=self._prompt_id, position=position, gap=None, moved=0.0, rounding=0.0
            )
        chosen, instead = self._plain.tokens[position], run.tokens[position]

        def gap(rerun: Rerun) -> float:
            logits = rerun.logits[position]
            return float(logits[chosen]) - float(logits[instead])

        plain = gap(self._rerun_evenly(1))
        logits = self._rerun_evenly(1).logits[position, [chosen, instead]]
        controls = [own, *(self._rerun_evenly(size) for size in CONTROL_SIZES)]
        return TextDifference(
            prompt_id=self._prompt_id,
            position=position,
            gap=plain,
            moved=max(abs(gap(control) - plain) for control in controls),
            rounding=last_place(logits),
        )

    def _step_differences(
        self, run: Generation, own: Rerun, policy: SpecPolicy, unequal: Sequence[UnequalStep]
    ) -> tuple[StepDifference, ...]:
        if not unequal:
            return ()
        text = self._plain.tokens
        positions = {step.position for step in unequal}

        def redraft(rerun: Rerun, moves: Mapping[int, FloatArray]) -> dict[int, Redraft]:
            def lean(position: int, drafter: Drafter) -> Drafter:
                if position not in moves:
                    return drafter
                vocab_size = len(self._draft.lm_head)
                return LeaningDrafter(
                    drafter, text[position:], moves[position], vocab_size=vocab_size
                )

            return redraft_steps(
                self._draft, rerun, run, policy, text=text, positions=positions, wrap=lean
            )

        evenly = [self._rerun_evenly(size) for size in (1, *CONTROL_SIZES)]
        redrafts = [redraft(rerun, {}) for rerun in (own, *evenly)]
        moves = {
            position: measure_moves(
                redrafts[0][position].candidates,
                [other[position].candidates for other in redrafts[1:]],
            )
            for position in positions
        }
        deepest = 0 if policy.limits is None else policy.limits.num_steps
        moves = {at: np.pad(move, (0, deepest - len(move))) for at, move in moves.items()}
        against = redraft(own, {at: -move for at, move in moves.items()})
        in_favour = redraft(own, moves)
        return tuple(
            StepDifference(
                prompt_id=self._prompt_id,
                position=step.position,
                num_accept_tokens=step.num_accept_tokens,
                num_replayed=step.num_replayed,
                controls=tuple(each[step.position].num_accept_tokens for each in redrafts),
                moved=float(moves[step.position].max()),
                fewest=against[step.position].num_accept_tokens,
                most=in_favour[step.position].num_accept_tokens,
            )
            for step in unequal
        )

    def _rerun_evenly(self, size: int) -> Rerun:
        if size not in self._even:
            text = self._plain.tokens[: self._num_tokens]
            passes = even_passes(len(text), size)
            self._even[size] = rerun_text(self._target, self._plain.prompt, text, passes)
        return self._even[size]
