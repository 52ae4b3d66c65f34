"""How much the result hangs on each parameter of the search."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna

from sgl_eagle_tuner.report.analysis import Importance, Marginal

NUM_RANGES = 5
"""Ranges into which the values of a continuous parameter are gathered."""

MIN_TRIALS = 20
"""Trials without which importances would say more about the sampler than about the parameters."""


def rank_importances(study: optuna.Study, params: Sequence[str]) -> tuple[Importance, ...]:
    """PED-ANOVA importances: how far the better trials' values differ from those of all trials.

    Args:
        study: Finished study.
        params: Parameters of its sampled trials.

    Returns:
        Most important first; empty if too few trials finished.
    """
    finished = [
        trial
        for trial in study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE])
        if trial.params
    ]
    if len(finished) < MIN_TRIALS or len({trial.value for trial in finished}) == 1:
        return ()
    shares = optuna.importance.get_param_importances(
        study,
        evaluator=optuna.importance.PedAnovaImportanceEvaluator(),
        params=list(params),
    )
    return tuple(
        Importance(param=name, share=min(max(float(share), 0.0), 1.0))
        for name, share in shares.items()
        if np.isfinite(share)
    )


def marginal_curves(
    points: Sequence[tuple[Mapping[str, Any], float]], params: Sequence[str]
) -> tuple[Marginal, ...]:
    """Best and median objective at each value of each parameter.

    Args:
        points: Parameters and objective of every feasible trial.
        params: Parameters to look at, in the order of the result.

    Returns:
        One curve a parameter; empty if there are no points.
    """
    if not points:
        return ()
    return tuple(_marginal(points, name) for name in params)


def _marginal(points: Sequence[tuple[Mapping[str, Any], float]], name: str) -> Marginal:
    values = [params[name] for params, _ in points]
    objective = np.array([value for _, value in points])
    if isinstance(values[0], float):
        labels, groups = _ranges(np.array(values))
    else:
        distinct = sorted(set(values))
        labels = [str(value) for value in distinct]
        groups = np.array([distinct.index(value) for value in values])
    seen = [index for index in range(len(labels)) if (groups == index).any()]
    return Marginal(
        param=name,
        values=tuple(labels[index] for index in seen),
        best_us=tuple(float(objective[groups == index].min()) for index in seen),
        median_us=tuple(float(np.median(objective[groups == index])) for index in seen),
    )


def _ranges(values: np.ndarray[Any, Any]) -> tuple[list[str], np.ndarray[Any, Any]]:
    low, high = float(values.min()), float(values.max())
    edges = np.geomspace(low, high, NUM_RANGES + 1) if low < high else np.array([low, high])
    groups = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    labels = [f"{a:.2f} to {b:.2f}" for a, b in itertools.pairwise(edges)]
    return labels, groups
