"""What a step of speculation is worth: expected tokens, and tokens less the price of time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_eagle_harness.errors import PolicyConfigError
from sgl_eagle_harness.types import FloatArray


def expected_accept_length(accept_probs: npt.ArrayLike) -> FloatArray:
    """Expected tokens of a step, bonus token included.

    Args:
        accept_probs: [..., N] calibrated probabilities of the verified nodes, root excluded.

    Returns:
        [...] float64, one plus the sum.
    """
    return np.asarray(1.0 + np.asarray(accept_probs, np.float64).sum(axis=-1))


def value_at_price(
    tokens: npt.ArrayLike, time_us: npt.ArrayLike, price_tok_per_us: float
) -> FloatArray:
    """What is left of some tokens after paying for the time they take.

    Args:
        tokens: Expected tokens.
        time_us: Microseconds; broadcasts against `tokens`.
        price_tok_per_us: Tokens that one microsecond is worth.

    Returns:
        float64 tokens of the broadcast shape.
    """
    return np.asarray(np.asarray(tokens) - price_tok_per_us * np.asarray(time_us))


def chain_accept_length(accept_rate: float, num_steps: int) -> float:
    """Expected tokens of a chain whose every draft is accepted with the same probability.

    Args:
        accept_rate: Probability in [0, 1] that a draft is kept, given the ones before it were.
        num_steps: Drafts in the chain, at least 0.

    Returns:
        (1 - accept_rate^(num_steps + 1)) / (1 - accept_rate).

    Raises:
        PolicyConfigError: If an argument is out of range.
    """
    if not 0.0 <= accept_rate <= 1.0:
        raise PolicyConfigError(f"accept_rate must be in [0, 1], got {accept_rate=}")
    if num_steps < 0:
        raise PolicyConfigError(f"num_steps must be at least 0, got {num_steps=}")
    return float(np.power(accept_rate, np.arange(num_steps + 1, dtype=np.float64)).sum())


def chain_speedup(accept_rate: float, num_steps: int, draft_cost_ratio: float) -> float:
    """Speed of chain drafting over plain decoding where verification is as cheap as one token.

    Args:
        accept_rate: Probability in [0, 1] that a draft is kept, given the ones before it were.
        num_steps: Drafts in the chain, at least 0.
        draft_cost_ratio: Time of one draft step over that of one target pass, at least 0.

    Returns:
        Expected tokens over the cost of the step in target passes.

    Raises:
        PolicyConfigError: If an argument is out of range.
    """
    if draft_cost_ratio < 0:
        raise PolicyConfigError(f"draft_cost_ratio must be at least 0, got {draft_cost_ratio=}")
    return chain_accept_length(accept_rate, num_steps) / (1.0 + num_steps * draft_cost_ratio)


def best_chain_length(accept_rate: float, draft_cost_ratio: float, *, max_steps: int = 32) -> int:
    """Chain length of the highest `chain_speedup`.

    Args:
        accept_rate: Probability in [0, 1] that a draft is kept, given the ones before it were.
        draft_cost_ratio: Time of one draft step over that of one target pass, at least 0.
        max_steps: Longest chain considered.

    Returns:
        Number of drafts, 0 if plain decoding is fastest; the shortest among equals.

    Raises:
        PolicyConfigError: If an argument is out of range.
    """
    speedups = [chain_speedup(accept_rate, k, draft_cost_ratio) for k in range(max_steps + 1)]
    return int(np.argmax(speedups))
