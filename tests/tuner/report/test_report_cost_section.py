"""Cost tables in the report: every measured value, and the table's own error."""

import numpy as np
import pytest

from sgl_eagle_harness.cost_table import CostGrid, CostSetup, CostTable
from sgl_eagle_harness.records import ModelIdentity
from sgl_eagle_tuner.report.cost_section import summarise_costs


def _grid(kind: str, tokens: list[int], contexts: list[int]) -> CostGrid:
    us = 1_000.0 + 10.0 * np.array(tokens)[None, :, None] ** 2 + np.array(contexts)[None, None, :]
    us = np.concatenate([us, 2 * us])
    return CostGrid(
        kind=kind,
        batch_size=np.array([1, 4]),
        num_tokens=np.array(tokens),
        context_len=np.array(contexts),
        us=us,
    )


@pytest.fixture
def table() -> CostTable:
    model = ModelIdentity(name="m", sha256="0" * 64, dims={})
    return CostTable(
        setup=CostSetup(
            device="CPU",
            tensor_parallel_size=1,
            dtype="float32",
            attention_backend="sdpa",
            engine="reference",
            engine_version="0",
            num_threads=1,
            target=model,
            draft=model,
        ),
        target=_grid("target", [1, 2, 4], [0, 100]),
        draft=_grid("draft", [1, 2], [50]),
        draft_extend=_grid("draft_extend", [1, 3], [50]),
        decide_us=90.0,
        verify_select_us=30.0,
    )


def test_every_measured_value_is_in_one_curve(table: CostTable) -> None:
    section = summarise_costs(table, digest="ab")
    assert len(section.curves) == 2 * 2 + 2 + 2
    (curve,) = [
        curve
        for curve in section.curves
        if (curve.part, curve.batch_size, curve.context_len) == ("target", 4, 100)
    ]
    assert curve.num_tokens == (1, 2, 4)
    assert curve.median_us == (2_220.0, 2_280.0, 2_520.0)
    assert (section.decide_us, section.verify_select_us, section.digest) == (90.0, 30.0, "ab")


def test_only_grids_with_inner_points_have_an_error(table: CostTable) -> None:
    (error,) = summarise_costs(table).errors
    assert error.part == "target"
    assert error.num_cells == 4
    # Left out at two tokens: between 1010 and 1160 lies 1060 on the line, 1040 was measured.
    assert error.max_rel_error == pytest.approx(20 / 1_040)
