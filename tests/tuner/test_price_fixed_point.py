import pytest

from sgl_eagle_harness.errors import PolicyConfigError
from sgl_eagle_tuner.price_fixed_point import solve_price


def best_chain(price: float) -> tuple[float, float]:
    # Tokens and time of a chain of k drafts at accept rate 0.8, each draft 5 % of a target pass.
    chains = [((1 - 0.8 ** (k + 1)) / 0.2, 1.0 + 0.05 * k) for k in range(13)]
    return max(chains, key=lambda chain: chain[0] - price * chain[1])


def chain_throughput(price: float) -> float:
    tokens, time = best_chain(price)
    return tokens / time


def test_fixed_point_is_the_best_ratio_of_the_closed_formula():
    ratios = [(1 - 0.8 ** (k + 1)) / 0.2 / (1 + 0.05 * k) for k in range(13)]
    solution = solve_price(chain_throughput, start=1.0)
    assert solution.converged
    assert solution.throughput_tok_per_us == pytest.approx(max(ratios))
    assert solution.price_tok_per_us == pytest.approx(solution.throughput_tok_per_us, rel=5e-3)


def test_throughput_never_falls_on_the_way_up():
    reached = [point[1] for point in solve_price(chain_throughput, start=0.1).trajectory]
    assert reached == sorted(reached)


def test_wobble_is_bounded_and_the_best_price_is_kept():
    solution = solve_price(lambda price: 2.0 if price < 1.5 else 1.0, start=1.0)
    assert not solution.converged
    assert solution.trajectory == ((1.0, 2.0), (2.0, 1.0))
    assert solution.price_tok_per_us == 1.0
    assert solution.throughput_tok_per_us == 2.0


def test_iterations_are_bounded():
    solution = solve_price(lambda price: 1.1 * price, start=1.0, max_iterations=5)
    assert not solution.converged
    assert len(solution.trajectory) == 5


def test_start_must_be_positive():
    with pytest.raises(PolicyConfigError, match=r"must be positive, got start=0\.0"):
        solve_price(lambda price: price, start=0.0)
