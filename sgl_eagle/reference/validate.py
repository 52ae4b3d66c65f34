"""Validation on real prompts: greedy output against plain decoding, replay against the engine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_eagle.reference.comparison import (
    NEAR_TIE_BOUND,
    StepComparison,
    TextComparison,
    compare_steps,
    compare_texts,
)
from sgl_eagle.reference.decode import Engine
from sgl_eagle.reference.measure import encode_prompts, measure_policies
from sgl_eagle.reference.pair import Pair
from sgl_eagle.reference.prompts import Prompt
from sgl_eagle.reference.recorder import RecordConfig, record_prompts
from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.plain import PlainSpec
from sgl_eagle_harness.policies.registry import PolicySpec
from sgl_eagle_harness.policies.static import EAGLE1_PATHS, StaticSpec, chain_paths
from sgl_eagle_harness.trace_schema import PromptSource
from sgl_eagle_harness.trace_store import read_dense_trace
from sgl_eagle_tuner.price_fixed_point import solve_price
from sgl_eagle_tuner.search_space import PointBuilder, PricePoint, SearchSpace
from sgl_eagle_tuner.session import ReplaySession

STEP_TOLERANCE = {"float32": 0.0, "bfloat16": 0.005, "float16": 0.005}
"""Share of steps that replay may get wrong: none, but in half precision draft scores tie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyValidation:
    """One policy's counts.

    Attributes:
        policy: Its name.
        texts: Against plain decoding.
        steps: Engine against replay; None for plain decoding.
        accept_length: Tokens per target pass, bonus token included, as measured.
    """

    policy: str
    texts: TextComparison
    steps: StepComparison
    accept_length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """All policies on all prompts.

    Attributes:
        dtype: Type that target and draft ran in.
        near_tie_bound: Largest top-two logit gap that excuses a different text.
        step_tolerance: Share of steps that may differ from replay.
        policies: One for each policy.
    """

    dtype: str
    near_tie_bound: float
    step_tolerance: float
    policies: tuple[PolicyValidation, ...]

    @property
    def passed(self) -> bool:
        """No text differs off a near tie; no more steps differ than the tolerance allows."""
        return all(
            each.texts.num_different == 0
            and each.steps.num_steps - each.steps.num_equal
            <= self.step_tolerance * each.steps.num_steps
            for each in self.policies
        )


def validate_pair(
    pair: Pair,
    prompts: Sequence[Prompt],
    costs: CostTable,
    *,
    config: RecordConfig,
    source: PromptSource,
    on_stage: Callable[[str, int, str], Callable[[int], None]],
) -> Validation:
    """Record, replay and run every kind of policy on the same prompts.

    Args:
        pair: Target and draft.
        prompts: At least one.
        costs: Cost table that the price policy decides by; exactness does not depend on it.
        config: How to record; also fixes the completions' length.
        source: Where the prompts came from.
        on_stage: Called with name, expected units and unit of each stage; its result is called
            with units done.

    Returns:
        The counts.
    """
    budget = 2 * config.max_new_tokens * len(prompts)
    trace = _record(pair, prompts, config, source, on_stage("record", budget, "tok"))
    specs = {**static_specs(config), "price": price_spec(trace, costs)}
    encoded = encode_prompts(pair, prompts, max_new_tokens=config.max_new_tokens)
    built = {name: spec.build(costs) for name, spec in (("plain", PlainSpec()), *specs.items())}
    advance = on_stage("decode", len(built) * len(encoded), "run")
    measured = measure_policies(
        Engine(pair.target, pair.draft),
        encoded,
        built,
        max_new_tokens=config.max_new_tokens,
        stop_tokens=pair.stop_tokens,
        on_run=lambda: advance(1),
    )
    session = ReplaySession(trace, costs)
    plain = measured["plain"].generations
    bound = NEAR_TIE_BOUND[pair.dtype]
    return Validation(
        dtype=pair.dtype,
        near_tie_bound=bound,
        step_tolerance=STEP_TOLERANCE[pair.dtype],
        policies=tuple(
            PolicyValidation(
                policy=name,
                texts=compare_texts(plain, measured[name].generations, bound=bound),
                steps=compare_steps(trace, session.steps(spec), measured[name]),
                accept_length=measured[name].totals.accept_length,
            )
            for name, spec in specs.items()
        ),
    )


def static_specs(config: RecordConfig) -> dict[str, PolicySpec]:
    """Policies of every static kind that a recording covers.

    Args:
        config: How it was recorded.

    Returns:
        Name to spec: a chain, EAGLE-1's tree where the beams allow it, EAGLE-2 narrow and wide.
    """
    steps, widest = config.num_steps, config.beams[-1]
    chain = min(3, steps)
    specs: dict[str, PolicySpec] = {
        f"chain-{chain}": StaticSpec(name=f"chain-{chain}", paths=chain_paths(chain)),
        f"eagle2-{steps}-{widest}-32": Eagle2Spec(
            num_steps=steps, topk=widest, num_draft_tokens=32
        ),
    }
    if steps >= 5 and 4 in config.beams:  # noqa: PLR2004  EAGLE-3's usual setting
        specs["eagle2-5-4-8"] = Eagle2Spec(num_steps=5, topk=4, num_draft_tokens=8)
        specs["eagle1-tree"] = StaticSpec(name="eagle1-tree", paths=EAGLE1_PATHS)
    return specs


def price_spec(trace: DenseTrace, costs: CostTable) -> PolicySpec:
    """The price rule as theory has it, fitted on a trace, its price at the fixed point.

    Args:
        trace: Dense trace.
        costs: Measured costs.

    Returns:
        The policy, untuned.
    """
    session, builder = ReplaySession(trace, costs), PointBuilder(trace=trace, costs=costs)
    point: PricePoint = SearchSpace.covered_by(trace, costs).widest_points()[0]

    def throughput(price: float) -> float:
        return 1 / session.outcome(builder.build(point, price)).us_per_token

    plain = 1 / session.outcome(PlainSpec()).us_per_token
    return builder.build(point, solve_price(throughput, start=plain).price_tok_per_us)


def _record(
    pair: Pair,
    prompts: Sequence[Prompt],
    config: RecordConfig,
    source: PromptSource,
    on_tokens: Callable[[int], None],
) -> DenseTrace:
    with tempfile.TemporaryDirectory(prefix="sgl-eagle-") as folder:
        record_prompts(pair, prompts, Path(folder), config, source=source, on_tokens=on_tokens)
        return read_dense_trace(Path(folder))
