"""Policies that the serving check runs: one of each kind, over one cost table made by hand.

The table has the orders of magnitude of a 135M target on an H200; it serves to exercise the price
rule. A speed that it leads to says nothing about what a measured table would give.
"""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np

from sgl_eagle_harness.calibration import IdentityMap
from sgl_eagle_harness.continuation import ContinuationModel
from sgl_eagle_harness.cost_file import CostFile
from sgl_eagle_harness.cost_table import CostGrid, CostSetup, CostTable
from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.plain import PlainSpec
from sgl_eagle_harness.policies.policy_file import (
    PolicyFile,
    PolicyProvenance,
    save_policy_file,
)
from sgl_eagle_harness.policies.price import PriceSpec
from sgl_eagle_harness.policies.static import StaticSpec
from sgl_eagle_harness.records import ModelIdentity
from sgl_eagle_harness.trace_schema import SamplingParams

MODEL = ModelIdentity(name="any", sha256="0" * 64, dims={"hidden_size": 1})
IRREGULAR_PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 1), (0, 0, 0, 0))
"""Branches differ in depth, and a second child is expanded where a first one is not."""

CHAIN_PATHS = ((0,), (0, 0), (0, 0, 0))
"""What SGLang's EAGLE-3 with 3 steps, topk 1 and 4 tokens drafts."""


def write_policies(folder, *, largest_batch, longest_context):
    """Policy files by name."""
    costs = make_costs(largest_batch, longest_context)
    specs = {
        "plain": PlainSpec(),
        "static": StaticSpec(name="irregular", paths=IRREGULAR_PATHS),
        "chain": StaticSpec(name="chain", paths=CHAIN_PATHS),
        "eagle2": Eagle2Spec(num_steps=5, topk=4, num_draft_tokens=8),
        "price": make_price(),
    }
    return {name: _write(folder / f"{name}.json", spec, costs) for name, spec in specs.items()}


def make_price():
    shares = (0.55, 0.15, 0.08, 0.05)
    return PriceSpec(
        num_steps=5,
        topk=4,
        verify_sizes=(1, 4, 8, 16),
        widths=(1, 2, 4),
        price_tok_per_us=1 / 1700,
        calibration=IdentityMap(),
        continuation=ContinuationModel(
            prob_edges=(), ratios=tuple((shares,) for _ in range(5)), ranked_probs=()
        ),
    )


def make_costs(largest_batch, longest_context):
    def grid(kind, num_tokens, base, slope):
        axes = ((1, largest_batch), num_tokens, (0, longest_context))
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
            device="made by hand",
            tensor_parallel_size=1,
            dtype="bfloat16",
            attention_backend="triton",
            engine="sglang",
            engine_version="0.5.17",
            num_threads=1,
            target=MODEL,
            draft=MODEL,
        ),
        target=grid("target", (1, 2, 4, 8, 16), 2000.0, 3.5),
        draft=grid("draft", (1, 2, 4), 350.0, 1.0),
        draft_extend=grid("draft_extend", (1, 16), 500.0, 1.0),
        decide_us=100.0,
        verify_select_us=100.0,
    )


def _write(path, spec, costs):
    created = datetime(2026, 1, 1, tzinfo=UTC)
    file = CostFile.from_table(costs, num_repeats=1, created=created)
    record = PolicyFile(
        default=spec,
        costs=file if isinstance(spec, PriceSpec) else None,
        provenance=PolicyProvenance(
            traces=(),
            target=MODEL,
            draft=MODEL,
            sampling=SamplingParams(temperature=0.0),
            command="written by hand",
            seed=None,
            created=created,
            commit=None,
            versions={},
        ),
    )
    save_policy_file(path, record)
    return path
