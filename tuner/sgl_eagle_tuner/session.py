"""Replay of stored policies on one trace and one cost table, with a memory for repeats."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial

from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.errors import CostTableError
from sgl_eagle_harness.policies.registry import PolicySpec
from sgl_eagle_harness.types import TreeLimits
from sgl_eagle_tuner.outcome import Outcome
from sgl_eagle_tuner.replay import StepTable, replay_positions
from sgl_eagle_tuner.simulator import Simulation, SimulationConfig, simulate
from sgl_eagle_tuner.static_grid import replay_grid
from sgl_eagle_tuner.tier_gate import batch_decision, tier_gate
from sgl_eagle_tuner.walk import Run, walk

REMEMBERED_TABLES = 64


class ReplaySession:
    """Replays policies on one trace under one load; the latest step tables are kept for repeats."""

    def __init__(
        self, trace: DenseTrace, costs: CostTable, load: SimulationConfig | None = None
    ) -> None:
        """Join a trace, costs and a load.

        Args:
            trace: Prompts to decode.
            costs: Measured costs.
            load: Requests that decode together; None is one at a time, in the trace's order.

        Raises:
            CostTableError: If the costs are those of other models than the trace's.
        """
        for name in ("target", "draft"):
            recorded, measured = getattr(trace.header, name), getattr(costs.setup, name)
            if recorded.sha256 != measured.sha256:
                raise CostTableError(
                    f"the cost table was measured with the {name} {measured.name} "
                    f"({measured.sha256[:12]}), but the trace was recorded with {recorded.name} "
                    f"({recorded.sha256[:12]})"
                )
        self.trace = trace
        self.costs = costs
        self.load = load
        self._tables: OrderedDict[tuple[str, int], StepTable] = OrderedDict()

    def steps(self, spec: PolicySpec, *, batch_size: int = 1) -> StepTable:
        """One speculative step at every position.

        Args:
            spec: Policy to replay.
            batch_size: Batch size that its decisions see.

        Returns:
            The table; do not change its arrays.
        """
        key = (spec.model_dump_json(), batch_size)
        if key in self._tables:
            self._tables.move_to_end(key)
            return self._tables[key]
        table = replay_positions(self.trace, spec.build(self.costs), batch_size=batch_size)
        self._tables[key] = table
        if len(self._tables) > REMEMBERED_TABLES:
            self._tables.popitem(last=False)
        return table

    def run(self, spec: PolicySpec, *, timed_by: CostTable | None = None) -> Run:
        """Decode all prompts one after the other, whatever the load.

        Args:
            spec: Policy to run; it decides by the session's costs.
            timed_by: What its steps cost; None is the session's costs.

        Returns:
            The exact single-stream run.
        """
        gate = tier_gate(spec.build(self.costs), self.trace)
        begin_prompt = None if gate is None else gate.begin_prompt
        return walk(self.trace, self.steps(spec), timed_by or self.costs, begin_prompt=begin_prompt)

    def simulate(self, spec: PolicySpec, load: SimulationConfig) -> Simulation:
        """Serve all prompts in a closed loop.

        Args:
            spec: Policy to run.
            load: Load and batching.

        Returns:
            The simulation.
        """
        return simulate(
            self.trace,
            lambda batch_size: self.steps(spec, batch_size=batch_size),
            self.costs,
            load,
            speculates=batch_decision(spec.build(self.costs), self.trace),
        )

    def outcome(self, spec: PolicySpec) -> Outcome:
        """Speed and acceptance under the session's load.

        Args:
            spec: Policy to run.

        Returns:
            The outcome.
        """
        return (
            self.run(spec).outcome if self.load is None else self.simulate(spec, self.load).outcome
        )

    def grid_outcomes(self, settings: list[TreeLimits]) -> Iterator[tuple[TreeLimits, Outcome]]:
        """The same for many EAGLE-2/3 settings.

        Args:
            settings: Limits to replay.

        Yields:
            Each setting with its outcome.
        """
        for limits, steps in replay_grid(self.trace, settings):
            if self.load is None:
                yield limits, walk(self.trace, steps, self.costs).outcome
            else:
                # These policies decide the same at every batch size.
                table: Callable[[int], StepTable] = partial(_same_table, steps)
                yield limits, simulate(self.trace, table, self.costs, self.load).outcome


def _same_table(steps: StepTable, _batch_size: int) -> StepTable:
    return steps
