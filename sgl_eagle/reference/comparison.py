"""Is it lossless, and is replay exact? Two comparisons of runs, as counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_eagle.reference.decode import Generation
from sgl_eagle.reference.measure import Measured
from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_tuner.replay import StepTable

NEAR_TIE_BOUND = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Top-two logit gap up to which a different greedy choice counts as a numerical near tie.

The step between neighbouring bfloat16 numbers is 0.125 from 16 to 32 and 0.25 from 32 to 64, where
the best logits of these models lie: the bound is one or two steps. It excuses rounding of the
logits, not of the layers below, so it is a first look; `sgl-eagle validate` measures what rounding
does at each difference (`explain.py`). In float32 a pass over many tokens sums in another order
than a pass over one; 1e-3 is ten times what that was seen to change.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextComparison:
    """Greedy texts of a policy against those of plain decoding.

    Attributes:
        num_prompts: Prompts compared.
        num_equal: Texts that agree to the last token.
        num_near_ties: Texts whose first difference is at a near tie of the plain run.
        widest_gap: Largest top-two gap at a first difference; None without differences.
    """

    num_prompts: int
    num_equal: int
    num_near_ties: int
    widest_gap: float | None

    @property
    def num_different(self) -> int:
        """Texts that differ where no near tie excuses it."""
        return self.num_prompts - self.num_equal - self.num_near_ties


def compare_texts(
    plain: Sequence[Generation], other: Sequence[Generation], *, bound: float
) -> TextComparison:
    """Find the first difference of each text.

    Args:
        plain: Greedy runs of plain decoding, which know their top-two gaps.
        other: Greedy runs of a policy on the same prompts.
        bound: Largest gap of a near tie.

    Returns:
        The counts.
    """
    gaps = []
    for one, two in zip(plain, other, strict=True):
        first = first_difference(one.tokens, two.tokens)
        if first is not None:
            gaps.append(one.top_two_gaps[min(first, len(one.tokens) - 1)])
    num_near_ties = sum(gap <= bound for gap in gaps)
    return TextComparison(
        num_prompts=len(plain),
        num_equal=len(plain) - len(gaps),
        num_near_ties=num_near_ties,
        widest_gap=max(gaps, default=None),
    )


def first_difference(one: Sequence[int], two: Sequence[int]) -> int | None:
    """Where two completions of one prompt part.

    Args:
        one: Token ids.
        two: Token ids.

    Returns:
        Index of the first token that one of them has otherwise or no longer, None if they are
        equal.
    """
    shared = _shared_length(one, two)
    return None if shared == len(one) == len(two) else shared


@dataclass(frozen=True, slots=True, kw_only=True)
class UnequalStep:
    """A step that accepted another number of tokens than its replay.

    Attributes:
        prompt_id: Prompt.
        position: Index in the completion of the first token that the step emitted.
        num_accept_tokens: As the engine ran it, bonus token included.
        num_replayed: As replayed.
    """

    prompt_id: str
    position: int
    num_accept_tokens: int
    num_replayed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """Steps that an engine ran against the same steps in replay.

    Attributes:
        num_prompts: Prompts with at least one step compared.
        num_steps: Speculative steps compared.
        num_equal: Steps that accepted as many tokens in replay.
        num_same_size: Steps that verified as many tokens in replay.
        num_off_text: Steps left out, since the engine's text had left the recorded one at a tie.
        num_uncovered: Steps left out, since the trace does not hold all of their tree.
        unequal: The steps compared that accepted another number of tokens in replay.
    """

    num_prompts: int
    num_steps: int
    num_equal: int
    num_same_size: int
    num_off_text: int
    num_uncovered: int
    unequal: tuple[UnequalStep, ...]


def compare_steps(trace: DenseTrace, table: StepTable, measured: Measured) -> StepComparison:
    """Look every step of the engine up in replay's table of all positions.

    Args:
        trace: Dense trace that holds the measured prompts.
        table: Replay of the same policy on it.
        measured: Engine runs.

    Returns:
        The counts.
    """
    rows = dict(zip(trace.prompt_ids, trace.prompt_starts[:-1].tolist(), strict=True))
    ends = dict(zip(trace.prompt_ids, trace.prompt_starts[1:].tolist(), strict=True))
    num_prompts = num_steps = num_same_size = num_off_text = num_uncovered = 0
    unequal = []
    for prompt, run in zip(measured.prompts, measured.generations, strict=True):
        start = rows[prompt.id]
        recorded = trace.next_token[start : ends[prompt.id]].tolist()
        shared = _shared_length(recorded, run.tokens)
        compared = 0
        for step in run.steps:
            if not step.speculated:
                continue
            if step.position + step.num_accept_tokens > shared:
                num_off_text += 1
                continue
            row = start + step.position
            if table.uncovered[row]:
                num_uncovered += 1
                continue
            compared += 1
            num_same_size += int(table.num_draft_tokens[row] == step.num_draft_tokens)
            if table.num_accept_tokens[row] != step.num_accept_tokens:
                unequal.append(
                    UnequalStep(
                        prompt_id=prompt.id,
                        position=step.position,
                        num_accept_tokens=step.num_accept_tokens,
                        num_replayed=int(table.num_accept_tokens[row]),
                    )
                )
        num_steps += compared
        num_prompts += compared > 0
    return StepComparison(
        num_prompts=num_prompts,
        num_steps=num_steps,
        num_equal=num_steps - len(unequal),
        num_same_size=num_same_size,
        num_off_text=num_off_text,
        num_uncovered=num_uncovered,
        unequal=tuple(unequal),
    )


def _shared_length(recorded: Sequence[int], tokens: Sequence[int]) -> int:
    pairs = zip(recorded, tokens, strict=False)
    return next(
        (i for i, (one, two) in enumerate(pairs) if one != two), min(len(recorded), len(tokens))
    )
