"""Measuring costs: the grid that comes out, the setup it belongs to, and what is refused."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch installed")
pytest.importorskip("transformers", reason="needs transformers installed")

from sgl_eagle.reference.profile import (  # noqa: E402
    CostProfiler,
    ProfileConfig,
    cost_setup,
    measure_costs,
)
from sgl_eagle_harness.errors import CostTableError  # noqa: E402

CONFIG = ProfileConfig(
    num_tokens=(1, 2, 8),
    widths=(1, 4),
    num_pending=(1, 3),
    context_len=(1, 30, 1024),
    topk=4,
    num_repeats=2,
)


@pytest.fixture(scope="module")
def table(loaded_pair):
    cells = []
    found = measure_costs(loaded_pair, CONFIG, on_cell=lambda: cells.append(None))
    assert len(cells) == CONFIG.num_cells * CONFIG.num_repeats == 21 * 2
    return found


def test_every_cell_is_measured(table):
    assert table.target.us.shape == (1, 3, 3)
    assert table.draft.us.shape == table.draft_extend.us.shape == (1, 2, 3)
    assert table.decide_us > 0
    assert table.verify_select_us > 0
    assert table.verify_us(1, 5, 500) > 0


def test_median_ignores_a_slow_round_and_mean_counts_it(loaded_pair):
    profiler = CostProfiler(loaded_pair, CONFIG)
    with pytest.raises(CostTableError, match="at least one round of measurements, got 0"):
        profiler.table()
    for us in (10.0, 10.0, 40.0):
        profiler.run_round()
        profiler._rounds[-1][:] = us
    assert profiler.table().verify_us(1, 8, 30) == pytest.approx(10.0)
    assert profiler.table(average="mean").verify_us(1, 8, 30) == pytest.approx(20.0)
    profiler.begin()
    profiler.run_round()
    assert profiler.table().verify_us(1, 8, 30) > 0


def test_setup_is_that_of_this_process(table, loaded_pair):
    setup = cost_setup(loaded_pair)
    table.require_setup(setup)
    assert (setup.engine, setup.dtype, setup.num_threads) == (
        "reference",
        "float32",
        torch.get_num_threads(),
    )
    other = setup.model_copy(update={"num_threads": setup.num_threads + 1})
    with pytest.raises(CostTableError, match="another setup; num_threads: measured on"):
        table.require_setup(other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": (2, 4)}, r"num_tokens must begin with 1, got \(2, 4\)"),
        ({"widths": (1, 4, 2)}, r"widths must be distinct, ascending .*got \(1, 4, 2\)"),
        ({"context_len": ()}, r"context_len must be distinct, ascending .*got \(\)"),
        ({"num_repeats": 0}, "num_repeats must be at least 1, got 0"),
    ],
    ids=str,
)
def test_impossible_grids_are_refused(changes, message):
    with pytest.raises(CostTableError, match=message):
        ProfileConfig(**changes)


def test_contexts_beyond_the_target_are_refused(loaded_pair):
    config = ProfileConfig(context_len=(1, 1025))
    with pytest.raises(CostTableError, match="at most 1024 on this target, got 1025"):
        measure_costs(loaded_pair, config, on_cell=lambda: None)
