from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
from cost_maker import make_grid, make_setup, make_table
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_eagle_harness.cost_file import CostFile, load_cost_file, save_cost_file
from sgl_eagle_harness.cost_table import CostGrid
from sgl_eagle_harness.errors import CostTableError, CostTableRangeError

axes = st.lists(st.integers(1, 60), min_size=1, max_size=5, unique=True).map(sorted)


@given(batches=axes, tokens=axes, contexts=axes, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_monotone_medians_are_met_exactly_and_interpolation_stays_between(
    batches, tokens, contexts, seed
):
    rng = np.random.default_rng(seed)
    us = rng.uniform(1, 9, (len(batches), len(tokens), len(contexts))).cumsum(axis=1)
    grid = make_grid(batches=batches, tokens=tokens, contexts=contexts, us=lambda *_: us)
    for index, batch in enumerate(batches):
        found = grid.at(batch, np.array(tokens)[:, None], np.array(contexts))
        assert np.array_equal(found, us[index])
    every = np.arange(tokens[0], tokens[-1] + 1)
    curve = grid.at(batches[0], every, contexts[0])
    assert (np.diff(curve) >= 0).all()
    middle = grid.at(batches[0], tokens[0], np.arange(contexts[0], contexts[-1] + 1))
    assert middle.min() >= us[0, 0].min() - 1e-9
    assert middle.max() <= us[0, 0].max() + 1e-9


@given(values=st.lists(st.floats(1, 1e6), min_size=2, max_size=8))
@settings(max_examples=60, deadline=None)
def test_noisy_medians_never_make_more_tokens_cheaper(values):
    tokens = np.arange(len(values)) * 3 + 1
    grid = make_grid(tokens=tokens, us=lambda *_: np.repeat(np.array(values), 2).reshape(1, -1, 2))
    curve = grid.at(1, np.arange(1, tokens[-1] + 1), 500)
    assert (np.diff(curve) >= -1e-9 * curve[1:]).all()


def test_interpolation_is_linear_in_every_axis():
    grid = make_grid(
        batches=(1, 5), tokens=(1, 9), contexts=(0, 100), us=lambda b, n, c: 1 + b * n + c
    )
    assert grid.at(3, 5, 25) == pytest.approx(1 + 3 * 5 + 25)
    assert grid.at(1, np.array([[1], [5]]), np.array([0, 50, 100])).shape == (2, 3)
    assert grid.at(2, 9, 0) == pytest.approx(1 + 2 * 9)


@pytest.mark.parametrize(
    ("batch", "tokens", "context", "message"),
    [
        (2, 1, 0, r"batch_size must be in the measured range \[1, 1\], got batch_size=2"),
        (1, 0, 0, r"num_tokens must be in the measured range \[1, 64\], got num_tokens=0"),
        (1, 65, 0, "num_tokens=65"),
        (1, [1, 70], 0, "num_tokens=70"),
        (1, 1, 1001, "target: context_len must be"),
        (1, 1, [-1, 3], "context_len=-1"),
    ],
)
def test_outside_the_grid_is_an_error(batch, tokens, context, message):
    with pytest.raises(CostTableRangeError, match=message):
        make_grid().at(batch, tokens, context)


def test_an_axis_with_one_value_serves_only_that_value():
    grid = make_grid(batches=(4,), tokens=(1, 3), contexts=(200,))
    assert grid.at(4, 1, np.array([200, 200])).shape == (2,)
    with pytest.raises(CostTableRangeError, match="context_len=201"):
        grid.at(4, 1, 201)
    with pytest.raises(CostTableRangeError, match="batch_size=1"):
        grid.at(1, 1, 200)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": np.array([1, 1, 64])}, "target.num_tokens must be strictly increasing"),
        ({"batch_size": np.array([0])}, "target.batch_size must be strictly increasing from at"),
        ({"context_len": np.array([], np.int64)}, "target.context_len must be"),
        ({"us": np.ones((1, 3, 3))}, r"target.us must have shape \(1, 3, 2\)"),
        ({"us": np.full((1, 3, 2), np.nan)}, "finite and positive, got nan"),
        ({"us": np.zeros((1, 3, 2))}, "finite and positive, got 0.0"),
    ],
    ids=str,
)
def test_malformed_grid_is_refused(changes, message):
    good = make_grid()
    fields = {n: getattr(good, n) for n in ("batch_size", "num_tokens", "context_len", "us")}
    with pytest.raises(CostTableError, match=message):
        CostGrid(kind="target", **(fields | changes))


def test_catch_up_is_a_sum_of_whole_extends_and_a_rest():
    table = make_table(extend=(120.0, 5.0))
    largest = 33
    one = table.draft_extend_us(1, largest, 0)
    assert table.draft_catch_up_us(1, 20, 0) == table.draft_extend_us(1, 20, 0)
    assert table.draft_catch_up_us(1, largest, 0) == one
    assert table.draft_catch_up_us(1, 2 * largest + 4, 0) == pytest.approx(
        2 * one + table.draft_extend_us(1, 4, 0)
    )


def test_drafting_ahead_hides_the_shorter_of_step_and_decision():
    waits = make_table(draft=(100.0, 0.0), decide_us=30.0)
    assert waits.draft_level_us(1, 8, 0) == 130
    assert waits.wasted_draft_us(1, np.array([0, 9])).tolist() == [0, 0]
    ahead = replace(waits, drafts_ahead=True)
    assert ahead.draft_level_us(1, 8, 0) == 100
    # When the policy stops, the step has run during its decision and the choice of what to verify.
    assert ahead.wasted_draft_us(1, 0) == 100 - 30 - 30
    slow_host = replace(ahead, decide_us=150.0)
    assert slow_host.draft_level_us(1, 8, 0) == 150
    assert slow_host.wasted_draft_us(1, 0) == 0
    assert (waits.stop_us(1, 0), ahead.stop_us(1, 0), slow_host.stop_us(1, 0)) == (0, 70, 150)


def test_leave_out_error_is_zero_for_an_affine_cost_and_not_for_a_bent_one():
    straight = make_grid(tokens=(1, 5, 20, 64), contexts=(0, 10, 1000)).leave_out_error()
    assert straight.num_cells == 2 * 3 + 1 * 4
    assert straight.max_relative < 1e-12
    bent = make_grid(tokens=(1, 32, 64), us=lambda _b, n, _c: 100.0 + (n > 40) * 100.0)
    error = bent.leave_out_error()
    assert error.num_cells == 2
    assert error.max_relative == pytest.approx(0.5, abs=0.02)
    assert make_grid(tokens=(1, 2)).leave_out_error().num_cells == 0


def test_another_setup_is_refused_naming_every_field():
    table = make_table()
    table.require_setup(make_setup())
    with pytest.raises(
        CostTableError, match="device: measured on 'test device', running 'x'"
    ) as caught:
        table.require_setup(make_setup(device="x", num_threads=2))
    assert "num_threads: measured on 1, running 2" in str(caught.value)


@pytest.fixture
def record():
    created = datetime(2026, 1, 1, tzinfo=UTC)
    return CostFile.from_table(make_table(), num_repeats=5, created=created)


def test_file_round_trip(tmp_path, record):
    path = tmp_path / "cost.json"
    save_cost_file(path, record)
    found = load_cost_file(path)
    assert found == record
    assert found.sha256 == record.sha256
    assert found.to_table().verify_us(1, 7, 3) == make_table().verify_us(1, 7, 3)
    assert found.target.holdout_error.num_cells == 3 * 2
    assert [p.name for p in tmp_path.iterdir()] == ["cost.json"]


def test_what_a_host_launches_is_kept_and_changes_no_digest_of_tables_without_it(tmp_path, record):
    path = tmp_path / "cost.json"
    payload = json.loads(record.model_dump_json())
    assert payload.pop("launch") is None
    path.write_text(json.dumps(payload))  # as an earlier version wrote it
    assert load_cost_file(path).sha256 == record.sha256
    assert load_cost_file(path).to_table().launch is None
    table = replace(make_table(), launch=make_grid("launch", us=lambda b, n, c: 9 * b + n + c))
    told = CostFile.from_table(table, num_repeats=5, created=record.created)
    assert told.sha256 != record.sha256
    save_cost_file(path, told)
    assert load_cost_file(path).to_table().launch.at(1, 8, 1000) == pytest.approx(9 + 8 + 1000)


def test_what_a_host_launches_shares_the_axes_of_the_rounds(record):
    table = replace(make_table(), launch=make_grid("launch", contexts=(0, 7)))
    with pytest.raises(CostTableError, match="target and launch must share the context_len axis"):
        CostFile.from_table(table, num_repeats=5, created=record.created)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(schema_version=9), "schema_version must be 1, got schema_version=9"),
        (lambda d: d.update(colour="red"), "colour: Extra inputs are not permitted"),
        (lambda d: d["target"].update(us=[[[1.0]]]), "target.us must have shape"),
        (lambda d: d["target"]["us"][0][0].pop(), "target.us must be a full array"),
        (
            lambda d: d["draft"]["us"][0].__setitem__(0, [float("nan")] * 2),
            "draft.us must be finite",
        ),
        (lambda d: d["draft"].update(num_tokens=[8, 1, 32]), "draft.num_tokens must be strictly"),
        (lambda d: d.update(decide_us=-1.0), "decide_us must be finite and at least 0, got -1.0"),
        (lambda d: d["setup"].pop("device"), "setup.device: Field required"),
        (lambda d: d.update(created="yesterday"), "created: Input should be a valid datetime"),
    ],
)
def test_bad_file_is_refused_by_file_and_field(tmp_path, record, edit, message):
    path = tmp_path / "cost.json"
    payload = json.loads(record.model_dump_json())
    edit(payload)
    path.write_text(json.dumps(payload))
    with pytest.raises(CostTableError, match=message) as caught:
        load_cost_file(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is not JSON"), ("[]", "must hold a JSON object, got list")]
)
def test_other_content_is_refused(tmp_path, content, message):
    path = tmp_path / "cost.json"
    path.write_text(content)
    with pytest.raises(CostTableError, match=message):
        load_cost_file(path)
    with pytest.raises(CostTableError, match="cannot read"):
        load_cost_file(tmp_path / "none.json")
