"""The online map starts as its prior, moves to what is true and keeps trees closed."""

from __future__ import annotations

import numpy as np
import pytest
from calibration_maker import some_maps
from hypothesis import given
from hypothesis import strategies as st
from tree_maker import RandomDrafter, make_batch

from sgl_eagle_harness.calibration import IdentityMap, IsotonicMap, TemperatureMap
from sgl_eagle_harness.decayed_ratio import DecayedRatio
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.errors import CalibrationError
from sgl_eagle_harness.node_outcome import spell_path, spell_paths
from sgl_eagle_harness.online_calibration import OnlineCalibration, OnlineCalibrationConfig
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.reliability import assess
from sgl_eagle_harness.types import TreeLimits


def draw_nodes(rng, num_nodes, truth, num_depths=3):
    depths = rng.integers(1, num_depths + 1, num_nodes)
    logs = np.log(rng.uniform(0.001, 1.0, num_nodes)).astype(np.float32)
    accepted = (rng.random(num_nodes) < truth(np.exp(logs), depths)).astype(np.float64)
    return depths, logs, accepted


def probs_of(calibration, depth, logs):
    logs = np.asarray(logs, np.float32)
    return calibration.child_accept_probs(
        depth=depth,
        path_log_confidence=logs,
        step_log_probs=logs,
        ranks=np.zeros(len(logs), np.int64),
        parent_probs=np.ones(len(logs)),
    )


@pytest.mark.parametrize("prior", [m for m in some_maps() if not isinstance(m, TemperatureMap)])
def test_before_the_first_observation_it_is_the_prior(prior):
    online = OnlineCalibration(prior, num_depths=3)
    assert online.calibration() is prior
    online.observe(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0))
    assert online.calibration() is prior


def test_a_few_observations_hardly_move_it():
    online = OnlineCalibration(IdentityMap(), num_depths=2)
    online.observe(np.array([1, 1]), np.log(np.array([0.5, 0.5], np.float32)), np.zeros(2))
    logs = np.log(np.linspace(0.05, 0.95, 19))
    moved = np.abs(probs_of(online.calibration(), 1, logs) - np.exp(logs))
    assert 0 < moved.max() < 0.06
    assert np.abs(probs_of(online.calibration(), 2, logs) - np.exp(logs)).max() < 1e-3


def test_it_learns_an_overconfident_draft_and_its_depth():
    rng = np.random.default_rng(0)

    def truth(probs, depths):
        return probs**2 * np.where(depths > 1, 0.5, 1.0)

    online = OnlineCalibration(IdentityMap(), num_depths=3)
    for _ in range(100):
        online.observe(*draw_nodes(rng, 400, truth))
    logs = np.log(np.linspace(0.2, 0.9, 15))
    for depth in (1, 2, 3):
        expected = truth(np.exp(logs), np.full(15, depth))
        assert np.abs(probs_of(online.calibration(), depth, logs) - expected).max() < 0.06
    depths, logs, accepted = draw_nodes(rng, 20_000, truth)
    scores = {
        name: assess(
            np.choose(depths - 1, [probs_of(calibration, d, logs) for d in (1, 2, 3)]), accepted
        ).brier
        for name, calibration in (("prior", IdentityMap()), ("online", online.calibration()))
    }
    assert scores["online"] < 0.9 * scores["prior"]


def test_where_the_prior_is_right_it_stays():
    rng = np.random.default_rng(1)
    online = OnlineCalibration(IdentityMap(), num_depths=3)
    for _ in range(50):
        online.observe(*draw_nodes(rng, 400, lambda probs, _: probs))
    logs = np.log(np.linspace(0.05, 1.0, 30))
    assert np.abs(probs_of(online.calibration(), 2, logs) - np.exp(logs)).max() < 0.05


def test_it_forgets_a_workload_that_is_gone():
    rng = np.random.default_rng(2)
    config = OnlineCalibrationConfig(half_life_nodes=2000.0)
    online = OnlineCalibration(IdentityMap(), num_depths=1, config=config)
    for factor in (0.3, 1.0):
        for _ in range(60):
            online.observe(*draw_nodes(rng, 400, lambda p, _, f=factor: f * p, num_depths=1))
    assert probs_of(online.calibration(), 1, np.log([0.5]))[0] == pytest.approx(0.5, abs=0.08)


def test_memory_does_not_grow():
    rng = np.random.default_rng(3)
    online = OnlineCalibration(IdentityMap(), num_depths=4)
    before = online.num_cells
    for _ in range(30):
        online.observe(*draw_nodes(rng, 1000, lambda probs, _: probs, num_depths=9))
    assert online.num_cells == before == 4 * 48
    assert online.num_observed == 30_000


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 400),
    st.sampled_from([m for m in some_maps() if not isinstance(m, TemperatureMap)]),
)
def test_curves_never_fall_and_children_never_exceed_their_parents(seed, num_nodes, prior):
    rng = np.random.default_rng(seed)
    online = OnlineCalibration(prior, num_depths=3)
    online.observe(*draw_nodes(rng, num_nodes, lambda probs, _: rng.random(probs.shape)))
    calibration = online.calibration()
    assert isinstance(calibration, IsotonicMap)  # whose own check refuses a curve that falls
    logs = np.sort(np.log(rng.uniform(1e-6, 1.0, 50))).astype(np.float32)
    parents = rng.random(50)
    children = calibration.child_accept_probs(
        depth=2,
        path_log_confidence=logs,
        step_log_probs=logs,
        ranks=np.zeros(50, np.int64),
        parent_probs=parents,
    )
    assert (children <= parents).all()
    assert (children >= 0).all()


def test_temperature_maps_are_refused():
    with pytest.raises(CalibrationError, match="kind identity or isotonic, got TemperatureMap"):
        OnlineCalibration(TemperatureMap(temperatures=(1.0,)), num_depths=2)
    with pytest.raises(CalibrationError, match="num_depths must be at least 1, got num_depths=0"):
        OnlineCalibration(IdentityMap(), num_depths=0)


def test_a_ratio_returns_to_one_when_nothing_is_observed():
    ratio = DecayedRatio((2,), prior=10.0, half_life=5.0)
    assert ratio.values().tolist() == [1.0, 1.0]
    ratio.add(np.array([1, 1]), np.array([0.0, 10.0]), np.array([10.0, 30.0]))
    assert ratio.values() == pytest.approx([1.0, 20 / 50])
    ratio.decay(5.0)
    assert ratio.values() == pytest.approx([1.0, 15 / 30])
    ratio.decay(500.0)
    assert ratio.values() == pytest.approx([1.0, 1.0])
    with pytest.raises(CalibrationError, match="half_life must be above 0, got half_life=0"):
        DecayedRatio((1,), prior=1.0, half_life=0.0)


def test_the_text_tells_the_outcome_of_every_node_that_it_reaches():
    #  root -> 5, 7; 5 -> 1, 2; 7 -> 1, 2; and below the second 1 -> 9
    tokens = np.array([5, 7, 1, 2, 1, 2, 9])
    parents = np.array([-1, -1, 0, 0, 1, 1, 4])
    depths = np.array([1, 1, 2, 2, 2, 2, 3])
    for text, spelled in (
        ([7, 1, 9, 4], {1, 4, 6}),
        ([7, 1], {1, 4}),
        ([6, 1], set()),
        ([], set()),
    ):
        found = spell_path(tokens, parents, depths, np.array(text, np.int64))
        assert set(np.flatnonzero(found)) == spelled


@pytest.mark.parametrize("seed", range(8))
def test_texts_of_many_trees_are_spelled_as_each_alone(seed):
    policy = Eagle2Policy(limits=TreeLimits(num_steps=3, topk=3, num_draft_tokens=8))
    trees = grow_trees(RandomDrafter(seed, 6), policy, make_batch(6))
    rng = np.random.default_rng(seed)
    # Texts that follow a random branch for a while, and end anywhere.
    texts, lengths = rng.integers(40, size=(6, 4)), rng.integers(5, size=6)
    for row in range(6):
        node = int(rng.choice(np.flatnonzero(trees.valid[row] & (trees.depths == 3))))
        for depth in (2, 1, 0):
            texts[row, depth], node = trees.tokens[row, node], trees.parents[row, node]
    found = spell_paths(trees, texts, lengths)
    assert found.any()
    for row in range(6):
        nodes = np.flatnonzero(trees.valid[row])
        new_index = np.full(trees.num_nodes + 1, -1)
        new_index[nodes] = np.arange(len(nodes))
        parents = new_index[trees.parents[row, nodes]]
        text = texts[row, : lengths[row]]
        wanted = spell_path(trees.tokens[row, nodes], parents, trees.depths[nodes], text)
        assert found[row, nodes].tolist() == wanted.tolist()
        assert not found[row, ~trees.valid[row]].any()
