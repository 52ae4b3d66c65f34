"""Synthetic cost tables for tests: affine in tokens and context."""

from __future__ import annotations

import numpy as np

from sgl_eagle_harness.cost_table import CostGrid, CostSetup, CostTable
from sgl_eagle_harness.records import ModelIdentity


def make_setup(**changes) -> CostSetup:
    fields = {
        "device": "test device",
        "tensor_parallel_size": 1,
        "dtype": "float32",
        "attention_backend": "plain",
        "engine": "reference",
        "engine_version": "0.1.0",
        "num_threads": 1,
        "target": ModelIdentity(name="target", sha256="a" * 64, dims={"hidden_size": 8}),
        "draft": ModelIdentity(name="draft", sha256="b" * 64, dims={"hidden_size": 8}),
    }
    return CostSetup(**(fields | changes))


def make_grid(kind="target", *, batches=(1,), tokens=(1, 8, 64), contexts=(0, 1000), us=None):
    b, n, c = np.meshgrid(batches, tokens, contexts, indexing="ij")
    return CostGrid(
        kind=kind,
        batch_size=np.array(batches),
        num_tokens=np.array(tokens),
        context_len=np.array(contexts),
        us=(us or (lambda b, n, c: 100.0 + b * n + 0.01 * c))(b, n, c).astype(np.float64),
    )


def make_table(
    *, target=(1000.0, 10.0), draft=(100.0, 5.0), extend=(120.0, 5.0), decide_us=2.0, batches=(1,)
) -> CostTable:
    def affine(kind, pair, tokens):
        base, slope = pair
        return make_grid(
            kind, batches=batches, tokens=tokens, us=lambda b, n, _c: base + slope * b * n
        )

    return CostTable(
        setup=make_setup(),
        target=affine("target", target, (1, 2, 8, 64, 256)),
        draft=affine("draft", draft, (1, 8, 32)),
        draft_extend=affine("draft_extend", extend, (1, 8, 33)),
        decide_us=decide_us,
        verify_select_us=decide_us,
    )
