"""The grid of start-up costs: its reach, its order and its time limit, on a made-up clock."""

import numpy as np
import pytest
from fake_server import CATCH_UP_US, GRID, FakeServer, measure

from sgl_eagle.plugin.profile_grid import ProfileGrid, grid_for
from sgl_eagle_harness.errors import CostTableError


def test_a_whole_grid_in_rows_of_rounds():
    server = FakeServer()
    table, profiler = measure(server)
    assert table.target.at(4, 8, 64) == pytest.approx(100 + 32 + 6.4)
    assert table.verify_us(4, 8, 64) == pytest.approx(138.4 + 18)
    # Eight plain rounds share what catching up with eight tokens takes.
    assert table.decode_us(4, 64) == pytest.approx(100 + 4 + 6.4 + CATCH_UP_US / 8)
    assert table.drafts_ahead
    assert table.rounds_in_a_row
    assert table.draft_step_us(16, 1, 1) == table.draft_step_us(16, 4, 1) == pytest.approx(112)
    assert table.draft_catch_up_us(4, 1, 1) == 0
    assert len(server.warmed_up) == GRID.num_cells
    assert len(server.timed) == GRID.num_cells * 3
    assert profiler.fewest_repeats == 3 * 2


def test_where_the_host_runs_ahead_what_it_launches_is_told_apart():
    assert measure(FakeServer())[0].launch is None
    table, _ = measure(FakeServer(runs_ahead=True))
    assert table.launch.at(4, [1, 8], 64) == pytest.approx([50 + 4 + 1, 50 + 4 + 8])


def test_the_ends_come_first_and_points_between_them_if_there_is_time():
    server = FakeServer(seconds_per_round=0.5)
    table, profiler = measure(server, budget_s=30.0)
    corners = {(b, c) for b, _, c in server.timed[: 2 * 2 * 3]}
    assert corners == {(1, 1), (1, 512), (16, 1), (16, 512)}
    assert table.target.batch_size.tolist() == [1, 4, 16]
    assert table.target.context_len.tolist() == [1, 512]
    assert server.seconds <= 30 + 1  # the row that was running
    assert profiler.fewest_repeats == 2


def test_too_slow_a_server_is_not_guessed_at():
    with pytest.raises(CostTableError, match="16 requests with 512 tokens could not be measured"):
        measure(FakeServer(seconds_per_round=1.0))


@pytest.mark.parametrize(
    ("largest", "longest", "batches", "contexts"),
    [
        (1, 100, (1,), (1, 100)),
        (8, 512, (1, 4, 8), (1, 512)),
        (48, 4096, (1, 4, 16, 48), (1, 256, 4096)),
        (256, 131072, (1, 4, 16, 64, 256), (1, 256, 2048, 16384, 131072)),
    ],
)
def test_grids_reach_from_one_to_the_servers_limits(largest, longest, batches, contexts):
    grid = grid_for(largest_batch=largest, sizes=(1, 2), longest_context=longest, width=2)
    assert grid.batch_sizes == batches
    assert grid.context_lens == contexts


def test_axes_must_rise_from_one():
    with pytest.raises(CostTableError, match=r"num_tokens must rise from 1, got \[2, 4\]"):
        ProfileGrid(batch_sizes=(1,), num_tokens=(2, 4), context_lens=(1,), width=1)


def test_a_server_of_one_request_has_one_batch_size():
    table, _ = measure(
        FakeServer(), grid=grid_for(largest_batch=1, sizes=(1, 2), longest_context=64, width=1)
    )
    assert table.draft.num_tokens.tolist() == [1]
    assert np.isfinite(table.verify_us(1, 2, 32))
