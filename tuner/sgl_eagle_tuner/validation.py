"""Held-out scores with intervals: paired bootstrap over prompts, and predicted against measured.

Prompts, not steps, are resampled: steps of one prompt share its text and are not independent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sgl_eagle_harness.errors import ReportError
from sgl_eagle_harness.types import FloatArray, IntArray
from sgl_eagle_tuner.prompt_totals import US_PER_S, PromptTotals

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure with its bootstrap interval.

    Attributes:
        value: The figure on all prompts.
        low: Lower end of the percentile interval.
        high: Upper end.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionError:
    """Predicted against measured speed of one setting on the same prompts.

    Attributes:
        predicted_tok_per_s: From replay and the cost table.
        measured_tok_per_s: From running the engine.
        ratio: Predicted over measured; 1 is perfect.
        accept_length_ratio: The same for accept length, which no cost error can touch.
        us_per_step_ratio: The same for the mean time of a step, which no replay error can touch.
        prompt_abs_error: Median over prompts of the absolute relative error of tokens per second.
    """

    predicted_tok_per_s: float
    measured_tok_per_s: float
    ratio: float
    accept_length_ratio: float
    us_per_step_ratio: float
    prompt_abs_error: float


def bootstrap_tok_per_s(
    totals: PromptTotals, *, seed: int, num_resamples: int = NUM_RESAMPLES
) -> Interval:
    """Tokens per second with a 95 % percentile interval over prompts.

    Args:
        totals: At least one prompt; one prompt alone gives an interval of width zero.
        seed: Of the resampling.
        num_resamples: Bootstrap samples.

    Returns:
        Tokens per second.
    """
    return _bootstrap(
        lambda index: (
            totals.num_tokens[index].sum(-1) / totals.elapsed_us[index].sum(-1) * US_PER_S
        ),
        totals,
        seed,
        num_resamples,
    )


def bootstrap_speedup(
    candidate: PromptTotals,
    baseline: PromptTotals,
    *,
    seed: int,
    num_resamples: int = NUM_RESAMPLES,
) -> Interval:
    """Ratio of tokens per second, candidate over baseline, paired by prompt.

    Args:
        candidate: One run.
        baseline: Another run on the same prompts in the same order.
        seed: Of the resampling.
        num_resamples: Bootstrap samples.

    Returns:
        The ratio; above 1 the candidate is the faster one.

    Raises:
        ReportError: If the prompts differ.
    """
    _require_same_prompts(candidate, baseline)

    def ratio(index: IntArray) -> FloatArray:
        ours = candidate.num_tokens[index].sum(-1) / candidate.elapsed_us[index].sum(-1)
        theirs = baseline.num_tokens[index].sum(-1) / baseline.elapsed_us[index].sum(-1)
        return np.asarray(ours / theirs, np.float64)

    return _bootstrap(ratio, candidate, seed, num_resamples)


def compare_prediction(predicted: PromptTotals, measured: PromptTotals) -> PredictionError:
    """Hold a prediction against what the engine did on the same prompts.

    Args:
        predicted: From replay and the cost table.
        measured: From the engine.

    Returns:
        The ratios, split into accept length and step time so that the two are not confused.

    Raises:
        ReportError: If the prompts differ.
    """
    _require_same_prompts(predicted, measured)
    ours = predicted.num_tokens / predicted.elapsed_us
    theirs = measured.num_tokens / measured.elapsed_us
    step_us = [t.elapsed_us.sum() / t.num_verifies.sum() for t in (predicted, measured)]
    return PredictionError(
        predicted_tok_per_s=predicted.tok_per_s,
        measured_tok_per_s=measured.tok_per_s,
        ratio=predicted.tok_per_s / measured.tok_per_s,
        accept_length_ratio=predicted.accept_length / measured.accept_length,
        us_per_step_ratio=float(step_us[0] / step_us[1]),
        prompt_abs_error=float(np.median(np.abs(ours / theirs - 1))),
    )


def clears(speedup: Interval) -> bool:
    """Whether a gain is real: the whole interval lies above 1.

    Args:
        speedup: From `bootstrap_speedup`.

    Returns:
        True if even the lower end is a gain.
    """
    return speedup.low > 1


def _require_same_prompts(first: PromptTotals, second: PromptTotals) -> None:
    if first.prompt_ids != second.prompt_ids:
        only = sorted(set(first.prompt_ids) ^ set(second.prompt_ids))
        raise ReportError(
            f"runs to compare must cover the same prompts in the same order; they have "
            f"{len(first.prompt_ids)} and {len(second.prompt_ids)} prompts, in one only: {only[:5]}"
        )


def _bootstrap(
    statistic: Callable[[IntArray], FloatArray],
    totals: PromptTotals,
    seed: int,
    num_resamples: int,
) -> Interval:
    # A completion of one token has no decode step, and a sample of such alone would have no speed.
    prompts = np.flatnonzero(totals.num_tokens)
    rng = np.random.default_rng(seed)
    samples = rng.choice(prompts, size=(num_resamples, len(prompts)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(statistic(samples), [tail, 1 - tail])
    return Interval(value=float(statistic(prompts)), low=float(low), high=float(high))
