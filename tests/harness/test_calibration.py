from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from calibration_maker import make_biased_trace, some_maps
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from trace_maker import make_header, make_prompt
from tree_maker import RandomDrafter, make_batch

from sgl_eagle_harness.calibration import (
    CalibrationFile,
    IdentityMap,
    IsotonicMap,
    TemperatureMap,
    calibration_from_json,
    load_calibration_file,
    save_calibration_file,
    scale_step,
)
from sgl_eagle_harness.calibration_fit import fit_calibration
from sgl_eagle_harness.confidence import sample_nodes
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.errors import CalibrationError
from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.reliability import assess
from sgl_eagle_harness.trace_store import read_dense_trace, write_dense_shard
from sgl_eagle_harness.types import NO_NODE, CandidateTrees, TreeLimits

LIMITS = TreeLimits(num_steps=2, topk=2, num_draft_tokens=4)
FIRST_RANKS = TreeLimits(num_steps=2, topk=1, num_draft_tokens=2)


def map_trees(calibration, trees, known=None):
    return calibration.accept_probs(
        trees.path_log_confidence,
        trees.step_log_probs,
        trees.depths,
        trees.ranks,
        trees.parents,
        known=known,
    )


def grow(seed, topk, num_steps, certain=0.0):
    policy = Eagle2Spec(num_steps=num_steps, topk=topk, num_draft_tokens=2).build(None)
    return grow_trees(RandomDrafter(seed, 3, certain=certain), policy, make_batch(3))


@given(
    which=st.integers(0, 3),
    seed=st.integers(0, 5000),
    topk=st.integers(1, 4),
    num_steps=st.integers(1, 4),
    certain=st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=80, deadline=None)
def test_probabilities_are_bounded_and_never_rise_along_a_path(
    which, seed, topk, num_steps, certain
):
    trees = grow(seed, topk, num_steps, certain)
    probs = map_trees(some_maps()[which], trees)
    assert probs.dtype == np.float64
    assert ((probs >= 0) & (probs <= 1)).all()
    assert (probs[~trees.valid] == 0).all()
    inner = trees.parents != NO_NODE
    above = np.take_along_axis(probs, np.maximum(trees.parents, 0), axis=1)
    assert (probs <= np.where(inner, above, 1.0)).all()


@pytest.mark.parametrize("which", range(4))
def test_padding_is_never_acceptable(which):
    drafter = RandomDrafter(2, 2)
    trees = CandidateTrees.empty(2).append(np.full((2, 1), NO_NODE), drafter.expand_root(2))
    frontier = np.array([[0, 1], [NO_NODE, NO_NODE]])
    trees = trees.append(frontier, drafter.expand(frontier, 2))
    probs = map_trees(some_maps()[which], trees)
    assert (probs[1, 2:] == 0).all()
    assert probs[0, 2:].max() > 0


@pytest.mark.parametrize("which", range(4))
def test_higher_path_confidence_never_maps_lower_at_one_depth(which):
    calibration = some_maps()[which]
    logs = -np.sort(-np.log(np.random.default_rng(0).random(200))).astype(np.float32)
    probs = calibration.child_accept_probs(
        depth=1,
        path_log_confidence=logs,
        step_log_probs=logs,
        ranks=np.zeros(200, np.int64),
        parent_probs=np.ones(200),
    )
    assert (np.diff(probs) <= 1e-7).all()


@pytest.mark.parametrize("which", range(4))
def test_known_columns_are_extended_not_recomputed(which):
    calibration = some_maps()[which]
    trees = grow(3, 3, 4)
    whole = map_trees(calibration, trees)
    start = trees.level_starts[2]
    assert np.array_equal(map_trees(calibration, trees, known=whole[:, :start]), whole)
    marked = np.full((3, start), 0.25)
    extended = map_trees(calibration, trees, known=marked)
    assert (extended[:, :start] == 0.25).all()
    assert extended.max() <= 0.25


def test_trees_and_trace_samples_are_mapped_alike(tmp_path):
    prompt = make_prompt(np.random.default_rng(5), num_steps=3, num_positions=6)
    path = tmp_path / "t.parquet"
    write_dense_shard(path, make_header(), [prompt])
    trace = read_dense_trace(path)
    limits = TreeLimits(num_steps=3, topk=2, num_draft_tokens=4)
    for calibration in some_maps():
        sample = sample_nodes(trace, limits)
        sums = np.zeros(trace.tokens.shape, np.float32)
        for depth in (1, 2, 3):
            columns = np.flatnonzero(trace.depths[0] == depth)
            parents = trace.parents[0, columns]
            sums[:, columns] = trace.step_log_probs[:, columns]
            if depth > 1:
                sums[:, columns] += sums[:, parents]
        padded = calibration.accept_probs(
            sums,
            trace.step_log_probs,
            trace.depths[0].astype(np.int64),
            trace.ranks[0].astype(np.int64),
            trace.parents.astype(np.int64),
        )
        inside = np.arange(6)[:, None] + trace.depths <= 6
        assert np.array_equal(calibration.sample_accept_probs(sample), padded[inside])


def test_sample_leaves_out_what_lies_beyond_text_and_limits(tmp_path):
    path = tmp_path / "t.parquet"
    prompts = [make_prompt(np.random.default_rng(i), prompt_id=f"p{i}") for i in range(2)]
    write_dense_shard(path, make_header(), prompts)
    trace = read_dense_trace(path)
    sample = sample_nodes(trace, TreeLimits(num_steps=2, topk=1, num_draft_tokens=2))
    assert len(sample.depths) == 2 * (12 + 11)
    assert (sample.ranks == 0).all()
    assert sample.accepted[sample.depths == 1].mean() == pytest.approx(trace.on_path[:, 0].mean())
    second = sample.depths == 2
    assert (sample.depths[sample.parents[second]] == 1).all()


def test_temperature_fit_finds_the_drafters_own_temperature(tmp_path):
    trace = make_biased_trace(tmp_path / "t.parquet", temperature=2.0)
    weights = (trace.ranks == 0).astype(float)  # only first ranks follow the known law
    fitted = fit_calibration("temperature", trace, LIMITS, weights=weights)
    assert fitted.temperatures == pytest.approx([2.0, 2.0], rel=0.26)
    chain = fit_calibration("temperature", trace, FIRST_RANKS)
    assert chain.temperatures == fitted.temperatures


def test_each_metric_is_lowest_for_its_own_fit(tmp_path):
    trace = make_biased_trace(tmp_path / "t.parquet", temperature=2.0)
    sample = sample_nodes(trace, FIRST_RANKS)
    by_nll, by_ece = (
        assess(
            fit_calibration("temperature", trace, FIRST_RANKS, metric=metric).sample_accept_probs(
                sample
            ),
            sample.accepted,
        )
        for metric in ("nll", "ece")
    )
    assert by_ece.ece <= by_nll.ece
    assert by_nll.nll <= by_ece.nll


@pytest.mark.parametrize("kind", ["temperature", "isotonic"])
def test_calibration_improves_on_held_out_positions(tmp_path, kind):
    trace = make_biased_trace(tmp_path / "t.parquet", temperature=2.5, seed=1)
    held_out = make_biased_trace(tmp_path / "h.parquet", temperature=2.5, seed=2)
    fitted = fit_calibration(kind, trace, FIRST_RANKS)
    sample = sample_nodes(held_out, FIRST_RANKS)
    before = assess(IdentityMap().sample_accept_probs(sample), sample.accepted)
    after = assess(fitted.sample_accept_probs(sample), sample.accepted)
    assert before.ece > 0.06
    assert after.ece < before.ece / 2
    assert after.nll < before.nll
    assert after.brier < before.brier


def test_isotonic_meets_the_observed_rates_and_pools_thin_depths(tmp_path):
    trace = make_biased_trace(tmp_path / "t.parquet", temperature=2.0)
    fitted = fit_calibration("isotonic", trace, LIMITS)
    sample = sample_nodes(trace, LIMITS)
    probs = fitted.sample_accept_probs(sample)
    for depth in (1, 2):
        at = sample.depths == depth
        assert probs[at].mean() == pytest.approx(sample.accepted[at].mean(), abs=0.02)
    short = make_biased_trace(tmp_path / "s.parquet", num_positions=60, num_steps=6, temperature=3)
    deep = fit_calibration("isotonic", short, TreeLimits(num_steps=6, topk=2, num_draft_tokens=4))
    assert deep.curves[-1] == deep.curves[-2]
    assert deep.curves[0] != deep.curves[-1]


def test_target_probabilities_replace_outcomes_above_temperature_0(tmp_path):
    prompt = make_prompt(np.random.default_rng(0))
    scores = np.full(prompt.tokens.shape, np.log(0.5), np.float32)
    path = tmp_path / "t.parquet"
    write_dense_shard(path, make_header(), [replace(prompt, target_log_probs=scores)])
    sample = sample_nodes(
        read_dense_trace(path), TreeLimits(num_steps=3, topk=2, num_draft_tokens=4)
    )
    assert sample.accepted == pytest.approx(0.5**sample.depths)


def test_unfit_data_is_refused(tmp_path):
    path = tmp_path / "t.parquet"
    write_dense_shard(path, make_header(), [make_prompt(np.random.default_rng(0), agreement=0.0)])
    trace = read_dense_trace(path)
    with pytest.raises(CalibrationError, match="at least 20 accepted nodes, got"):
        fit_calibration("isotonic", trace, LIMITS)
    with pytest.raises(CalibrationError, match="kind must be identity, temperature or isotonic"):
        fit_calibration("beta", make_biased_trace(tmp_path / "b.parquet"), LIMITS)
    censored = replace(trace, header=make_header(censored=True))
    with pytest.raises(CalibrationError, match="censored must be false"):
        fit_calibration("identity", censored, LIMITS)


def test_scale_step_keeps_ends_and_half():
    logs = np.log(np.array([1.0, 0.5, 1e-30], np.float32))
    assert scale_step(logs, 1.0) == pytest.approx([1.0, 0.5, 0.0], abs=1e-6)
    assert scale_step(logs, 4.0)[1] == pytest.approx(0.5)
    assert scale_step(np.array([-np.inf], np.float32), 4.0)[0] == 0


@pytest.mark.parametrize("calibration", some_maps(), ids=lambda c: c.kind)
def test_json_round_trip(calibration, tmp_path):
    assert calibration_from_json(calibration.model_dump_json()) == calibration
    record = CalibrationFile(
        calibration=calibration,
        target_sha256="a" * 64,
        draft_sha256="b" * 64,
        temperature=0.0,
        num_positions=10,
        workloads=("code",),
    )
    save_calibration_file(tmp_path / "c.json", record)
    assert load_calibration_file(tmp_path / "c.json") == record


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"kind": "beta"}, "does not match any of the expected tags"),
        ({"kind": "temperature", "temperatures": [0.0]}, "greater than 0"),
        ({"kind": "temperature", "temperatures": []}, "at least 1 item"),
        ({"kind": "isotonic", "lowest_log": -1.0, "curves": [[0.5, 0.4]]}, "must not fall"),
        ({"kind": "isotonic", "lowest_log": -1.0, "curves": [[0.5]]}, "at least 2"),
        ({"kind": "isotonic", "lowest_log": -1.0, "curves": [[0, 1], [0, 0.5, 1]]}, "same number"),
        ({"kind": "isotonic", "lowest_log": -1.0, "curves": [[0.5, 1.4]]}, "less than or equal"),
        ({"kind": "isotonic", "lowest_log": 1.0, "curves": [[0, 1]]}, "less than 0"),
    ],
)
def test_malformed_map_is_refused(payload, message, tmp_path):
    with pytest.raises(ValidationError, match=message):
        calibration_from_json(json.dumps(payload))
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"schema_version": 1, "calibration": payload}))
    with pytest.raises(CalibrationError, match=r"c\.json: calibration"):
        load_calibration_file(path)


def test_maps_of_one_kind_compare_by_value():
    assert TemperatureMap(temperatures=(1.0,)) == TemperatureMap(temperatures=(1.0,))
    one, two = (IsotonicMap(lowest_log=-1.0, curves=((0.0, y),)) for y in (1.0, 0.5))
    assert one != two
