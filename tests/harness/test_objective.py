from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_eagle_harness.errors import PolicyConfigError
from sgl_eagle_harness.objective import (
    best_chain_length,
    chain_accept_length,
    chain_speedup,
    expected_accept_length,
    value_at_price,
)


@pytest.mark.parametrize(
    ("accept_rate", "cost", "max_steps", "length", "tokens", "speedup"),
    [
        (0.6, 0.1, 32, 3, 2.18, 1.67),
        (0.8, 0.05, 6, 6, 3.95, 3.04),
        (0.8, 0.05, 32, 8, 4.33, 3.09),
    ],
)
def test_best_chain(accept_rate, cost, max_steps, length, tokens, speedup):
    assert best_chain_length(accept_rate, cost, max_steps=max_steps) == length
    assert chain_accept_length(accept_rate, length) == pytest.approx(tokens, abs=0.005)
    assert chain_speedup(accept_rate, length, cost) == pytest.approx(speedup, abs=0.005)


def test_an_expensive_draft_loses():
    assert chain_speedup(0.8, 6, 0.5) == pytest.approx(0.99, abs=0.005)
    assert best_chain_length(0.3, 0.5) == 0


@given(rate=st.floats(0, 0.99), steps=st.integers(0, 30))
def test_closed_formula(rate, steps):
    assert chain_accept_length(rate, steps) == pytest.approx(
        (1 - rate ** (steps + 1)) / (1 - rate), rel=1e-9
    )


def test_a_certain_chain_accepts_everything():
    assert chain_accept_length(1.0, 7) == 8.0


def test_value_and_expectation_broadcast():
    probs = np.array([[0.9, 0.5], [0.1, 0.0]])
    assert expected_accept_length(probs) == pytest.approx([2.4, 1.1])
    assert value_at_price([2.4, 1.1], 100.0, 0.01) == pytest.approx([1.4, 0.1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chain_accept_length(1.1, 2), "accept_rate=1.1"),
        (lambda: chain_accept_length(0.5, -1), "num_steps=-1"),
        (lambda: chain_speedup(0.5, 1, -0.1), "draft_cost_ratio=-0.1"),
    ],
)
def test_arguments_out_of_range(call, message):
    with pytest.raises(PolicyConfigError, match=message):
        call()
