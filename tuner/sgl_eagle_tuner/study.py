"""One workload's search: baselines, the price of time, and an Optuna study around both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import optuna
from optuna.trial import TrialState

from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.price import PriceSpec
from sgl_eagle_tuner.baselines import Candidate, replay_baselines
from sgl_eagle_tuner.price_fixed_point import PriceSolution, solve_price
from sgl_eagle_tuner.report.analysis import SearchResult, Trial
from sgl_eagle_tuner.search_space import PointBuilder, PricePoint, SearchSpace
from sgl_eagle_tuner.sensitivity import marginal_curves, rank_importances
from sgl_eagle_tuner.session import ReplaySession
from sgl_eagle_tuner.study_config import StudyConfig
from sgl_eagle_tuner.study_store import open_study, study_name

BASELINE_KEY = "baseline"
UNCOVERED_KEY = "uncovered_share"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOutcome:
    """What a search found, on tuning prompts only.

    Attributes:
        baselines: Plain, usual (if covered), best static, and the price rule at its fixed point.
        finalists: Best trials of the price policy, best first; empty if none was feasible.
        price: The price of time.
        search: All trials and their sensitivity.
    """

    baselines: tuple[Candidate, ...]
    finalists: tuple[Candidate, ...]
    price: PriceSolution
    search: SearchResult


def run_study(
    workload: str,
    session: ReplaySession,
    config: StudyConfig,
    *,
    cost_sha256: str,
    on_trial: Callable[[], None] = lambda: None,
) -> StudyOutcome:
    """Search one workload.

    Args:
        workload: Its name.
        session: Its tuning prompts under the load to tune for.
        config: How to search.
        cost_sha256: Digest of the cost table, which becomes part of the study's name.
        on_trial: Called once for every trial, baselines and resumed ones included.

    Returns:
        Baselines, finalists and all trials.
    """
    started = time.perf_counter()
    space = SearchSpace.covered_by(session.trace, session.costs)
    builder = PointBuilder(trace=session.trace, costs=session.costs)
    baselines = replay_baselines(session, uncovered_limit=config.uncovered_limit)
    widest = space.widest_points()[0]
    price = solve_price(
        lambda price_tok_per_us: (
            1 / session.outcome(builder.build(widest, price_tok_per_us)).us_per_token
        ),
        start=1 / baselines[0].outcome.us_per_token,
    )
    fixed_price = price.price_tok_per_us

    def objective(trial: optuna.Trial) -> float:
        outcome = session.outcome(builder.build(space.suggest(trial), fixed_price))
        trial.set_user_attr(UNCOVERED_KEY, outcome.uncovered_share)
        if outcome.uncovered_share > config.uncovered_limit:
            raise optuna.TrialPruned
        return outcome.us_per_token

    name = study_name(workload, space, session, config, cost_sha256=cost_sha256)
    study = open_study(name, workload, config)
    if not study.get_trials(deepcopy=False):
        _begin_with_baselines(study, baselines, space)
    states = [trial.state for trial in study.get_trials(deepcopy=False)]
    num_finished = sum(state.is_finished() for state in states)
    num_waiting = states.count(TrialState.WAITING)
    for _ in range(num_finished):
        on_trial()
    for _ in range(max(config.num_trials - num_finished, num_waiting)):
        _run_trial(study, objective)
        on_trial()
    at_fixed_point = builder.build(widest, fixed_price)
    fixed_candidate = Candidate(
        role="variant",
        label="price rule at its fixed point",
        spec=at_fixed_point,
        outcome=session.outcome(at_fixed_point),
    )
    return StudyOutcome(
        baselines=(*baselines, fixed_candidate),
        finalists=tuple(
            Candidate(role="tuned", label="tuned", spec=spec, outcome=session.outcome(spec))
            for spec in _best_specs(study, builder, fixed_price, config.num_finalists)
        ),
        price=price,
        search=_describe_search(
            workload, study, session, config, seconds=time.perf_counter() - started
        ),
    )


def _run_trial(study: optuna.Study, objective: Callable[[optuna.Trial], float]) -> None:
    # Not `Study.optimize`, which logs the traceback of whatever ends it, Ctrl-C included.
    trial = study.ask()
    try:
        value = objective(trial)
    except optuna.TrialPruned:
        study.tell(trial, state=TrialState.PRUNED)
    except KeyboardInterrupt:
        study.tell(trial, state=TrialState.FAIL)
        raise
    else:
        study.tell(trial, value)


def _begin_with_baselines(
    study: optuna.Study, baselines: list[Candidate], space: SearchSpace
) -> None:
    # Baselines are not points of the space: they enter as finished trials without parameters,
    # which the sampler does not learn from.
    for candidate in baselines:
        finished = optuna.trial.create_trial(
            value=candidate.outcome.us_per_token, user_attrs={BASELINE_KEY: candidate.label}
        )
        study.add_trial(finished)
    for point in space.widest_points():
        label = f"price rule at its fixed point, {point.calibration}"
        study.enqueue_trial(point.params(), user_attrs={BASELINE_KEY: label})
    best_static = baselines[-1].spec
    if isinstance(best_static, Eagle2Spec):
        for point in space.points_within(best_static.build(None).limits):
            study.enqueue_trial(point.params())


def _best_specs(
    study: optuna.Study, builder: PointBuilder, fixed_price: float, count: int
) -> list[PriceSpec]:
    trials = [
        trial
        for trial in study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        if trial.params
    ]
    specs: list[PriceSpec] = []
    for trial in sorted(trials, key=lambda trial: trial.value or 0.0):
        spec = builder.build(PricePoint.from_params(trial.params), fixed_price)
        if spec not in specs:
            specs.append(spec)
        if len(specs) == count:
            break
    return specs


def _describe_search(
    workload: str,
    study: optuna.Study,
    session: ReplaySession,
    config: StudyConfig,
    *,
    seconds: float,
) -> SearchResult:
    trials = [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]
    feasible = [
        (trial.params, trial.value)
        for trial in trials
        if trial.state == TrialState.COMPLETE and trial.params and trial.value is not None
    ]
    params = list(PricePoint.__slots__)
    importances = rank_importances(study, params)
    ranked = [importance.param for importance in importances] or params
    return SearchResult(
        workload=workload,
        trials=tuple(
            Trial(
                number=trial.number,
                time_per_token_us=trial.value if trial.state == TrialState.COMPLETE else None,
                baseline=trial.user_attrs.get(BASELINE_KEY),
            )
            for trial in trials
        ),
        importances=importances,
        marginals=marginal_curves(feasible, ranked),
        uncovered_limit=config.uncovered_limit,
        num_positions=session.trace.num_positions,
        seconds=seconds,
    )
