"""The price of time: the throughput that is reached when it is itself the price.

Maximising `tokens - price * time` in every step maximises tokens per time over a long run if the
price equals the best throughput (Dinkelbach). Iterating price <- throughput(price) from plain
decoding's throughput climbs to that point, since every exact step can only raise the throughput.
The policy's forecasts are estimates, so the climb may end in a small wobble: iteration is bounded,
ends where a price returns, and the whole trajectory is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sgl_eagle_harness.errors import PolicyConfigError

TOLERANCE = 5e-3
"""A price this far off moves throughput by far less: it is flat around its maximum."""
MAX_ITERATIONS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceSolution:
    """Where the iteration ended.

    Attributes:
        price_tok_per_us: The fixed point, or the best price tried where none was reached.
        throughput_tok_per_us: Throughput reached with it.
        converged: Whether price and throughput agreed within the tolerance at the end.
        trajectory: (price, throughput) of every iteration, tokens per microsecond.
    """

    price_tok_per_us: float
    throughput_tok_per_us: float
    converged: bool
    trajectory: tuple[tuple[float, float], ...]


def solve_price(
    throughput: Callable[[float], float],
    *,
    start: float,
    tolerance: float = TOLERANCE,
    max_iterations: int = MAX_ITERATIONS,
) -> PriceSolution:
    """Iterate price <- throughput(price).

    Args:
        throughput: Tokens per microsecond that the policy reaches at a price; one replay each.
        start: First price, tokens per microsecond; plain decoding's throughput is a good one.
        tolerance: Relative difference of price and throughput that counts as equal.
        max_iterations: Replays at most.

    Returns:
        The price, with the way to it.

    Raises:
        PolicyConfigError: If the start is not positive.
    """
    if not start > 0:
        raise PolicyConfigError(f"the price of time must be positive, got start={start}")
    price, converged = start, False
    trajectory: list[tuple[float, float]] = []
    tried: set[float] = set()
    while not converged and price not in tried and len(trajectory) < max_iterations:
        reached = throughput(price)
        tried.add(price)
        trajectory.append((price, reached))
        converged = abs(reached - price) <= tolerance * price
        price = reached
    last = trajectory[-1]
    best_price, best_throughput = last if converged else max(trajectory, key=lambda at: at[1])
    return PriceSolution(
        price_tok_per_us=best_price,
        throughput_tok_per_us=best_throughput,
        converged=converged,
        trajectory=tuple(trajectory),
    )
