"""The price of time while serving: solved from the cost table, corrected by what is measured."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sgl_eagle_harness.decayed_ratio import DecayedRatio
from sgl_eagle_harness.errors import PolicyConfigError
from sgl_eagle_harness.plan_throughput import PlanThroughput

PRIOR_US = 5e6
"""Time of decoding that the solved price counts for, in each range of batch sizes."""
HALF_LIFE_US = 60e6
"""Text changes within minutes; a price that follows faster follows noise."""
HIGHEST_RATIO = 1.5
"""An adaptive policy beats the best fixed plan by far less; more is a fault of the table."""


class PriceTracker:
    """One price for each batch size.

    A price that merely drifts after the measured average can settle below the best static setting
    (the average rewards whatever was done before). So the average only scales the solved price,
    slowly, and never below plain decoding's own throughput, which is always to be had.
    """

    def __init__(
        self,
        solve: Callable[[int], PlanThroughput],
        *,
        batch_edges: tuple[int, ...],
        prior_us: float = PRIOR_US,
        half_life_us: float = HALF_LIFE_US,
    ) -> None:
        """Start at the solved prices.

        Args:
            solve: Throughputs by the cost table, for a batch size.
            batch_edges: First batch size of each range that shares one correction, ascending.
            prior_us: Time that the solved price counts for.
            half_life_us: Decoding time after which a measurement counts half.

        Raises:
            PolicyConfigError: If the edges do not rise from 1.
        """
        if not batch_edges or list(batch_edges) != sorted(set(batch_edges)) or batch_edges[0] != 1:
            raise PolicyConfigError(f"batch_edges must rise from 1, got {list(batch_edges)}")
        self._solve = solve
        self._solved: dict[int, PlanThroughput] = {}
        self._edges = np.array(batch_edges)
        self._ratio = DecayedRatio((len(batch_edges),), prior=prior_us, half_life=half_life_us)

    def solved(self, batch_size: int) -> PlanThroughput:
        """What the table says.

        Args:
            batch_size: Requests decoded together.

        Returns:
            Plain and best throughput.
        """
        if batch_size not in self._solved:
            self._solved[batch_size] = self._solve(batch_size)
        return self._solved[batch_size]

    def price_tok_per_us(self, batch_size: int) -> float:
        """The price.

        Args:
            batch_size: Requests decoded together.

        Returns:
            Tokens that one microsecond of the whole batch is worth.
        """
        solved = self.solved(batch_size)
        ratio = float(self._ratio.values()[self._range_of(batch_size)])
        highest = HIGHEST_RATIO * solved.best_tok_per_us
        return min(max(ratio * solved.best_tok_per_us, solved.plain_tok_per_us), highest)

    def observe(self, batch_size: int, *, num_tokens: float, elapsed_us: float) -> None:
        """Learn from one decode step.

        Args:
            batch_size: Requests decoded together.
            num_tokens: Tokens that the step emitted for all of them.
            elapsed_us: Time that it took, above 0.
        """
        # In microseconds at the solved price: ranges and batch sizes weigh alike.
        at_solved_price = num_tokens / self.solved(batch_size).best_tok_per_us
        self._ratio.decay(elapsed_us)
        self._ratio.add(np.array([self._range_of(batch_size)]), at_solved_price, elapsed_us)

    def resolve(self) -> None:
        """Forget the solved prices, since what they follow from has changed."""
        self._solved.clear()

    def _range_of(self, batch_size: int) -> int:
        return int(np.searchsorted(self._edges, batch_size, side="right")) - 1
