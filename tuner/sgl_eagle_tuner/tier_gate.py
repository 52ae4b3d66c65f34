"""Tier decisions in replay: the engine's hysteresis on values that are computed once for all rows.

A tier's value depends on the position's context and on its pending tokens alone, so the values of
all positions are computed together, once for each number of pending tokens that a run meets.
"""

from __future__ import annotations

import numpy as np

from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.policies.tier import SpeculationTier, TieredPolicy
from sgl_eagle_harness.types import BatchContext, FloatArray, IntArray
from sgl_eagle_tuner.simulator import BatchSpeculates
from sgl_eagle_tuner.walk import Speculates


class TierGate:
    """Values of both tiers at every position of a trace, at one batch size."""

    def __init__(self, policy: TieredPolicy, trace: DenseTrace, *, batch_size: int) -> None:
        self._policy = policy
        self._context_len = trace.context_len
        self._batch_size = batch_size
        self._values: dict[int, tuple[FloatArray, FloatArray]] = {}
        self._lists: dict[int, tuple[list[float], list[float]]] = {}

    def values(self, num_pending: int) -> tuple[FloatArray, FloatArray]:
        """Values if every position had the same number of pending tokens.

        Args:
            num_pending: Tokens that the next draft-extend would process.

        Returns:
            [P] float64 value of speculating and [P] float64 value of decoding plainly.
        """
        if num_pending not in self._values:
            batch = BatchContext(
                batch_size=self._batch_size,
                context_len=self._context_len,
                num_pending=np.full(len(self._context_len), num_pending),
            )
            self._values[num_pending] = self._policy.tier_values(batch)
        return self._values[num_pending]

    def begin_prompt(self) -> Speculates:
        """Start one request.

        Returns:
            Its decision, as `walk` asks for it.
        """
        tier, config = SpeculationTier(), self._policy.tier

        def speculates(row: int, num_pending: int) -> bool:
            if num_pending not in self._lists:
                speculate, plain = self.values(num_pending)
                self._lists[num_pending] = (speculate.tolist(), plain.tolist())
            speculate_values, plain_values = self._lists[num_pending]
            return tier.choose_by_value(speculate_values[row], plain_values[row], config)

        return speculates


def tier_gate(policy: SpecPolicy, trace: DenseTrace, *, batch_size: int = 1) -> TierGate | None:
    """The gate of a policy that can be damped.

    Args:
        policy: Any policy.
        trace: P positions.
        batch_size: Requests that are decoded together.

    Returns:
        None for a policy without tiers, which decides the same at every position.
    """
    if not isinstance(policy, TieredPolicy):
        return None
    return TierGate(policy, trace, batch_size=batch_size)


def batch_decision(policy: SpecPolicy, trace: DenseTrace) -> BatchSpeculates | None:
    """One tier for a whole batch: the requests' mean values, damped as one request's.

    Args:
        policy: Any policy.
        trace: P positions.

    Returns:
        The decision, as `simulate` asks for it; None for a policy without tiers.
    """
    if not isinstance(policy, TieredPolicy):
        return None
    tiered: TieredPolicy = policy
    tier, gates = SpeculationTier(), dict[int, TierGate]()

    def speculates(rows: IntArray, num_pending: IntArray, batch_size: int) -> bool:
        if batch_size not in gates:
            gates[batch_size] = TierGate(tiered, trace, batch_size=batch_size)
        pairs = [gates[batch_size].values(int(count)) for count in num_pending]
        speculate, plain = (
            float(np.mean([pair[side][row] for pair, row in zip(pairs, rows, strict=True)]))
            for side in (0, 1)
        )
        return tier.choose_by_value(speculate, plain, tiered.tier)

    return speculates
