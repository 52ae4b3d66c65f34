from __future__ import annotations

import numpy as np
import pytest
from calibration_maker import make_biased_trace, make_continuation
from pydantic import ValidationError

from sgl_eagle_harness.calibration import IdentityMap
from sgl_eagle_harness.confidence import sample_nodes
from sgl_eagle_harness.continuation import (
    PROB_EDGES,
    ContinuationModel,
    fit_continuation,
    forecast_children,
)
from sgl_eagle_harness.errors import CalibrationError
from sgl_eagle_harness.types import TreeLimits

LIMITS = TreeLimits(num_steps=3, topk=2, num_draft_tokens=4)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return make_biased_trace(tmp_path_factory.mktemp("c") / "t.parquet", num_steps=3)


def test_root_forecast_is_the_mean_of_its_children(trace):
    model = fit_continuation(trace, IdentityMap(), LIMITS)
    found = forecast_children(model.as_array(), np.array(PROB_EDGES), 0, np.ones((1, 1)))
    probs = np.exp(trace.step_log_probs[:, :2].astype(np.float64))
    assert found.shape == (1, 1, 2)
    assert found[0, 0] == pytest.approx(probs.mean(axis=0), rel=1e-4)


def test_forecast_sums_match_the_trace_by_depth(trace):
    calibration = IdentityMap()
    model = fit_continuation(trace, calibration, LIMITS)
    sample = sample_nodes(trace, LIMITS)
    probs = calibration.sample_accept_probs(sample)
    for depth in (1, 2):
        at = np.flatnonzero((sample.depths == depth + 1) & (sample.ranks == 0))
        parents = probs[sample.parents[at]]
        forecast = forecast_children(model.as_array(), np.array(PROB_EDGES), depth, parents)
        assert forecast[:, 0].sum() == pytest.approx(probs[at].sum(), rel=0.02)


def test_ranked_shares_equal_sorting_every_position(trace):
    calibration = IdentityMap()
    model = fit_continuation(trace, calibration, LIMITS)
    sample = sample_nodes(trace, LIMITS)
    probs = calibration.sample_accept_probs(sample)
    for depth in (1, 2, 3):
        lists = []
        for row in range(trace.num_positions - 2):
            inside = (sample.rows == row) & (sample.depths <= depth)
            best_first = np.argsort(-probs[inside], kind="stable")
            lists.append(sample.accepted[inside][best_first])
        assert model.ranked_probs[depth - 1] == pytest.approx(np.mean(lists, axis=0))
    single = fit_continuation(trace.select(prompts=[0]), calibration, LIMITS)
    assert single.ranked_probs == model.ranked_probs


def test_forecast_never_exceeds_the_parent_and_falls_with_rank(trace):
    model = fit_continuation(trace, IdentityMap(), LIMITS)
    parents = np.linspace(0, 1, 50)
    forecast = forecast_children(model.as_array(), np.array(PROB_EDGES), 7, parents)
    assert (forecast <= parents[:, None]).all()
    assert (np.diff(forecast, axis=1) <= 1e-12).all()


def test_more_children_than_recorded_are_refused(trace):
    with pytest.raises(CalibrationError, match="at most the 2 children recorded, got 3"):
        fit_continuation(trace, IdentityMap(), TreeLimits(num_steps=2, topk=3, num_draft_tokens=4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prob_edges": (0.5, 0.2)}, "prob_edges must rise"),
        ({"ratios": (((0.5,),),)}, "without gaps"),
        ({"ratios": ()}, "at least 1 item"),
        ({"ratios": (((1.5,),) * 11,)}, "less than or equal to 1"),
        ({"ratios": (((0.5,),) * 10 + ((0.5, 0.1),),)}, "without gaps"),
    ],
    ids=str,
)
def test_malformed_model_is_refused(changes, message):
    payload = make_continuation().model_dump() | changes
    with pytest.raises(ValidationError, match=message):
        ContinuationModel.model_validate(payload)
