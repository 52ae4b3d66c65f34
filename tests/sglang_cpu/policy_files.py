"""One policy file of each kind, as a user would load them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from sgl_eagle_harness.calibration import IdentityMap
from sgl_eagle_harness.continuation import ContinuationModel
from sgl_eagle_harness.cost_file import CostFile
from sgl_eagle_harness.cost_table import CostGrid, CostSetup, CostTable
from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.plain import PlainSpec
from sgl_eagle_harness.policies.plan import PlanSpec
from sgl_eagle_harness.policies.policy_file import (
    PolicyFile,
    PolicyProvenance,
    save_policy_file,
)
from sgl_eagle_harness.policies.price import PriceSpec
from sgl_eagle_harness.policies.registry import PolicySpec
from sgl_eagle_harness.policies.static import StaticSpec, chain_paths
from sgl_eagle_harness.records import ModelIdentity
from sgl_eagle_harness.trace_schema import SamplingParams

CREATED = datetime(2026, 1, 1, tzinfo=UTC)
LONGEST_CONTEXT = 512
LARGEST_BATCH = 128
MODEL = ModelIdentity(name="tiny", sha256="0" * 64, dims={"hidden_size": 128})

IRREGULAR_PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (2, 0, 1), (0, 0, 0, 1))
"""A shape whose branches differ in depth and whose best child is not always expanded."""


def write_policies(folder: Path) -> dict[str, Path]:
    specs = {
        "plain": PlainSpec(),
        "chain": StaticSpec(name="chain-4", paths=chain_paths(4)),
        "narrow_chain": StaticSpec(name="chain-4", paths=chain_paths(4)),
        "narrow": Eagle2Spec(num_steps=3, topk=2, num_draft_tokens=6),
        "irregular": StaticSpec(name="irregular", paths=IRREGULAR_PATHS),
        "eagle2": Eagle2Spec(num_steps=3, topk=4, num_draft_tokens=10),
        "bushy": Eagle2Spec(num_steps=5, topk=4, num_draft_tokens=8),
        "plan": PlanSpec(
            num_steps=3,
            topk=4,
            verify_sizes=(1, 2, 4, 8),
            expected_drafts=((0.0, 0.6, 0.8, 0.8), (0.0, 0.6, 1.4, 1.6), (0.0, 0.6, 1.5, 1.9)),
        ),
        "plan_plain": PlanSpec(
            num_steps=3, topk=4, verify_sizes=(1, 8), expected_drafts=((0.0, 0.0),) * 3
        ),
        "price": make_price(),
        "price_dear": make_price(price_tok_per_us=1.0),
        "price_late": make_price(),
        "price_late_bushy": make_price(verify_sizes=(1, 2, 4, 8)),
        "price_pruned": make_price(price_tok_per_us=1 / 16).model_copy(
            update={"allow_plain": False}
        ),
        "price_of_reference_engine": make_price(),
    }
    return {name: _write(folder, name, spec) for name, spec in specs.items()}


def make_price(
    price_tok_per_us: float = 1 / 700, verify_sizes: tuple[int, ...] = (1, 2, 4, 8, 12, 16)
) -> PriceSpec:
    """A price policy that prunes, stops and narrows.

    With the dear price, time is worth more than any token and plain decoding always wins.
    """
    shares = (0.5, 0.2, 0.1, 0.05)
    return PriceSpec(
        num_steps=5,
        topk=4,
        verify_sizes=verify_sizes,
        widths=(1, 2, 4),
        price_tok_per_us=price_tok_per_us,
        calibration=IdentityMap(),
        continuation=ContinuationModel(
            prob_edges=(), ratios=tuple((shares,) for _ in range(5)), ranked_probs=()
        ),
    )


def _write(folder: Path, name: str, spec: PolicySpec) -> Path:
    engine = "reference" if name == "price_of_reference_engine" else "sglang"
    costs = make_late_costs() if name.startswith("price_late") else make_costs(engine)
    if name == "plan":
        costs = make_steep_costs()
    costs = CostFile.from_table(costs, num_repeats=1, created=CREATED)
    record = PolicyFile(
        default=spec,
        costs=costs if isinstance(spec, PriceSpec | PlanSpec) else None,
        provenance=PolicyProvenance(
            traces=(),
            target=MODEL,
            draft=MODEL,
            sampling=SamplingParams(temperature=0.0),
            command="written by hand",
            seed=None,
            created=CREATED,
            commit=None,
            versions={},
        ),
    )
    path = folder / f"{name}.json"
    save_policy_file(path, record)
    return path


def make_late_costs() -> CostTable:
    """Costs at which a request decodes plainly until its text is long enough, then speculates.

    Before that the draft's first step is dear, however many tokens it has to catch up with.
    """
    costs = make_costs("sglang")
    contexts = np.array([0, 1, 36, LONGEST_CONTEXT])

    def regrid(grid: CostGrid) -> CostGrid:
        us = np.stack([grid.us[..., 0]] * len(contexts), axis=-1)
        if grid.kind == "draft_extend":
            us = np.broadcast_to([2000.0, 2000.0, 50.0, 50.0], us.shape)
            grid = replace(grid, num_tokens=np.array([1, LONGEST_CONTEXT]))
        return replace(grid, context_len=contexts, us=us)

    names = ("target", "draft", "draft_extend")
    return replace(costs, **{name: regrid(getattr(costs, name)) for name in names})


def make_steep_costs() -> CostTable:
    """Costs at which a plan verifies four tokens of one request, two of four, and one of eight."""
    costs = make_costs("sglang")
    axes = (costs.target.batch_size, costs.target.num_tokens, costs.target.context_len)
    batch, tokens, _ = np.meshgrid(*axes, indexing="ij")
    return replace(costs, target=replace(costs.target, us=600.0 + 150.0 * batch * tokens))


def make_costs(engine: str) -> CostTable:
    """Latencies that rise with batch, tokens and context, as a large target's do."""

    def grid(kind: str, num_tokens: tuple[int, ...], base: float, slope: float) -> CostGrid:
        axes = ((1, LARGEST_BATCH), num_tokens, (0, LONGEST_CONTEXT))
        batch, tokens, context = np.meshgrid(*axes, indexing="ij")
        return CostGrid(
            kind=kind,
            batch_size=np.array(axes[0]),
            num_tokens=np.array(axes[1]),
            context_len=np.array(axes[2]),
            us=base + slope * batch * tokens + 0.01 * context,
        )

    return CostTable(
        setup=CostSetup(
            device="cpu",
            tensor_parallel_size=1,
            dtype="float32",
            attention_backend="intel_amx",
            engine=engine,
            engine_version="0.5.21",
            num_threads=1,
            target=MODEL,
            draft=MODEL,
        ),
        target=grid("target", (1, 2, 4, 8, 16), 600.0, 8.0),
        draft=grid("draft", (1, 2, 4), 40.0, 2.0),
        draft_extend=grid("draft_extend", (1, 16), 50.0, 1.0),
        decide_us=5.0,
        verify_select_us=5.0,
    )
