import numpy as np
import pytest

from sgl_eagle_harness.errors import ReportError
from sgl_eagle_tuner.prompt_totals import PromptTotals
from sgl_eagle_tuner.validation import (
    bootstrap_speedup,
    bootstrap_tok_per_s,
    clears,
    compare_prediction,
)


def totals(elapsed_us, num_tokens=None, num_verifies=None) -> PromptTotals:
    elapsed = np.asarray(elapsed_us, np.float64)
    tokens = np.full(len(elapsed), 100) if num_tokens is None else np.asarray(num_tokens)
    return PromptTotals(
        prompt_ids=tuple(f"prompt-{i}" for i in range(len(elapsed))),
        num_tokens=tokens,
        num_verifies=tokens // 2 if num_verifies is None else np.asarray(num_verifies),
        elapsed_us=elapsed,
    )


def test_speedup_is_a_ratio_of_sums_with_its_interval_around_it():
    rng = np.random.default_rng(0)
    base = rng.uniform(1000, 5000, 24)
    speedup = bootstrap_speedup(
        totals(base / rng.normal(1.2, 0.02, 24)), totals(base), seed=0, num_resamples=500
    )
    assert speedup.value == pytest.approx(1.2, abs=0.02)
    assert speedup.low < speedup.value < speedup.high
    assert clears(speedup)


def test_pairing_by_prompt_removes_what_prompts_have_in_common():
    base = np.geomspace(100, 100_000, 12)
    paired = bootstrap_speedup(totals(base / 1.05), totals(base), seed=0)
    assert paired.high - paired.low == pytest.approx(0, abs=1e-9)
    alone = bootstrap_tok_per_s(totals(base), seed=0)
    assert alone.high / alone.low > 2


def test_no_difference_does_not_clear():
    rng = np.random.default_rng(1)
    base = rng.uniform(1000, 5000, 16)
    noisy = base * rng.normal(1.0, 0.1, 16)
    assert not clears(bootstrap_speedup(totals(noisy), totals(base), seed=0))


def test_interval_covers_the_truth_about_as_often_as_stated():
    rng = np.random.default_rng(2)
    covered = 0
    for seed in range(100):
        base = rng.uniform(1000, 2000, 30)
        speedup = bootstrap_speedup(
            totals(base / rng.normal(1.1, 0.1, 30)), totals(base), seed=seed, num_resamples=200
        )
        covered += speedup.low <= 1.1 <= speedup.high
    assert 80 <= covered <= 100


def test_same_seed_same_interval():
    run = totals(np.geomspace(1.0, 50.0, 12))
    assert bootstrap_tok_per_s(run, seed=4) == bootstrap_tok_per_s(run, seed=4)
    assert bootstrap_tok_per_s(run, seed=4) != bootstrap_tok_per_s(run, seed=5)


def test_runs_on_other_prompts_are_not_compared():
    with pytest.raises(ReportError, match="same prompts in the same order; they have 2 and 3"):
        bootstrap_speedup(totals([1, 2]), totals([1, 2, 3]), seed=0)


def test_prediction_error_is_split_into_acceptance_and_time():
    measured = totals([1000.0, 1000.0], num_verifies=[50, 50])
    slower_steps = totals([1100.0, 1100.0], num_verifies=[50, 50])
    error = compare_prediction(slower_steps, measured)
    assert error.ratio == pytest.approx(1 / 1.1)
    assert error.accept_length_ratio == 1.0
    assert error.us_per_step_ratio == pytest.approx(1.1)
    fewer_steps = totals([800.0, 800.0], num_verifies=[40, 40])
    error = compare_prediction(fewer_steps, measured)
    assert error.ratio == pytest.approx(1.25)
    assert error.accept_length_ratio == pytest.approx(1.25)
    assert error.us_per_step_ratio == pytest.approx(1.0)
    assert error.prompt_abs_error == pytest.approx(0.25)
