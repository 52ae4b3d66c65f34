"""Validation on real prompts: greedy output against plain decoding, replay against the engine.

Differences are not judged by a bound but by controls, which measure what rounding does at the very
place (`explain.py`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_eagle.reference.comparison import StepComparison, compare_steps
from sgl_eagle.reference.decode import Engine
from sgl_eagle.reference.explain import (
    CONTROL_SIZES,
    PromptControl,
    StepDifference,
    TextDifference,
    tokens_needed,
)
from sgl_eagle.reference.measure import Measured, encode_prompts, measure_policies
from sgl_eagle.reference.pair import Pair
from sgl_eagle.reference.prompts import Prompt
from sgl_eagle.reference.record import RecordedText, record_text
from sgl_eagle.reference.record_config import RecordConfig
from sgl_eagle.reference.recorder import trace_header
from sgl_eagle.reference.sampling_config import GREEDY
from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.plain import PlainPolicy, PlainSpec
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.policies.recording import RecordingPolicy
from sgl_eagle_harness.policies.registry import PolicySpec
from sgl_eagle_harness.policies.static import EAGLE1_PATHS, StaticSpec, chain_paths
from sgl_eagle_harness.trace_schema import PromptSource
from sgl_eagle_harness.trace_store import SHARD_SUFFIX, read_dense_trace, write_dense_shard
from sgl_eagle_tuner.price_fixed_point import solve_price
from sgl_eagle_tuner.search_space import PointBuilder, PricePoint, SearchSpace
from sgl_eagle_tuner.session import ReplaySession


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyValidation:
    """One policy's findings.

    Attributes:
        policy: Its name.
        num_prompts: Texts compared with plain decoding.
        texts: Those that differ.
        steps: Engine against replay.
        step_differences: The steps that replay gets wrong.
        accept_length: Tokens per target pass, bonus token included, as measured.
    """

    policy: str
    num_prompts: int
    texts: tuple[TextDifference, ...]
    steps: StepComparison
    step_differences: tuple[StepDifference, ...]
    accept_length: float

    @property
    def num_equal_texts(self) -> int:
        """Texts that agree with plain decoding to the last token."""
        return self.num_prompts - len(self.texts)

    @property
    def num_unexplained_texts(self) -> int:
        """Texts that leave plain decoding where no control comes near."""
        return sum(not text.explained for text in self.texts)

    @property
    def num_unexplained_steps(self) -> int:
        """Steps that replay gets wrong and no control gets right."""
        return sum(not step.explained for step in self.step_differences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """All policies on all prompts.

    Attributes:
        dtype: Type that target and draft ran in.
        control_sizes: Tokens a pass of the controls, besides the engine's own passes.
        policies: One for each policy.
    """

    dtype: str
    control_sizes: tuple[int, ...]
    policies: tuple[PolicyValidation, ...]

    @property
    def passed(self) -> bool:
        """Rounding, as the controls show it, explains every difference."""
        return not any(
            each.num_unexplained_texts or each.num_unexplained_steps for each in self.policies
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
    """Decode plainly, record that text, run every kind of policy on the same prompts, and explain.

    Args:
        pair: Target and draft.
        prompts: At least one.
        costs: Cost table that the price policy decides by; exactness does not depend on it.
        config: What to record; also fixes the completions' length.
        source: Where the prompts came from.
        on_stage: Called with name, expected units and unit of each stage; its result is called
            with units done.

    Returns:
        The findings.
    """
    encoded = encode_prompts(pair, prompts, max_new_tokens=config.max_new_tokens)

    def decode(name: str, policies: Mapping[str, SpecPolicy]) -> dict[str, Measured]:
        advance = on_stage(name, len(policies) * len(encoded), "run")
        return measure_policies(
            Engine(pair.target, pair.draft),
            encoded,
            policies,
            max_new_tokens=config.max_new_tokens,
            stop_tokens=pair.stop_tokens,
            on_run=lambda: advance(1),
        )

    plain = decode("decode plainly", {"plain": PlainPolicy()})["plain"]
    trace = _record(pair, plain, config, source, on_stage("record", len(encoded), "prompt"))
    specs = {**static_specs(config), "price": price_spec(trace, costs)}
    policies = {name: spec.build(costs) for name, spec in specs.items()}
    measured = decode("decode", policies)
    session = ReplaySession(trace, costs)
    steps = {
        name: compare_steps(trace, session.steps(spec), measured[name])
        for name, spec in specs.items()
    }
    texts: dict[str, list[TextDifference]] = {name: [] for name in specs}
    step_differences: dict[str, list[StepDifference]] = {name: [] for name in specs}
    advance = on_stage("explain", len(encoded), "prompt")
    for index, prompt in enumerate(encoded):
        reference = plain.generations[index]
        runs = {name: each.generations[index] for name, each in measured.items()}
        unequal = {
            name: [step for step in each.unequal if step.prompt_id == prompt.id]
            for name, each in steps.items()
        }
        control = PromptControl(
            pair.target,
            pair.draft,
            reference,
            num_tokens=max(tokens_needed(reference, runs[name], unequal[name]) for name in runs),
            prompt_id=prompt.id,
        )
        for name, policy in policies.items():
            text, differences = control.explain_run(runs[name], policy, unequal[name])
            texts[name] += [] if text is None else [text]
            step_differences[name] += differences
        advance(1)
    return Validation(
        dtype=pair.dtype,
        control_sizes=CONTROL_SIZES,
        policies=tuple(
            PolicyValidation(
                policy=name,
                num_prompts=len(encoded),
                texts=tuple(texts[name]),
                steps=steps[name],
                step_differences=tuple(step_differences[name]),
                accept_length=measured[name].totals.accept_length,
            )
            for name in specs
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
    plain: Measured,
    config: RecordConfig,
    source: PromptSource,
    on_prompts: Callable[[int], None],
) -> DenseTrace:
    # Of the plain runs' own text: `record` decodes prompts together, which in half precision
    # writes other texts, and steps off the recorded text cannot be compared.
    policy = RecordingPolicy(num_steps=config.num_steps, beams=config.beams)
    traces = []
    for prompt, run in zip(plain.prompts, plain.generations, strict=True):
        text = RecordedText(
            prompt_id=prompt.id,
            workload=prompt.workload,
            prompt=run.prompt,
            completion=run.tokens,
        )
        traces.append(record_text(pair.target, pair.draft, text, policy=policy, sampling=GREEDY))
        on_prompts(1)
    header = trace_header(pair, config, source=source, commit=None)
    with tempfile.TemporaryDirectory(prefix="sgl-eagle-") as folder:
        write_dense_shard(Path(folder) / f"plain{SHARD_SUFFIX}", header, traces)
        return read_dense_trace(Path(folder))
