import optuna
import pytest

from sgl_eagle_harness.errors import PolicyConfigError
from sgl_eagle_harness.policies.plain import PlainSpec
from sgl_eagle_tuner.report.base import Estimate
from sgl_eagle_tuner.rescore import choose_setting, rescore_workload
from sgl_eagle_tuner.search_space import PricePoint, SearchSpace, verify_sizes
from sgl_eagle_tuner.sensitivity import marginal_curves, rank_importances
from sgl_eagle_tuner.session import ReplaySession
from sgl_eagle_tuner.study import run_study
from sgl_eagle_tuner.study_config import StudyConfig
from sgl_eagle_tuner.study_store import study_name

COSTS = "0" * 64


@pytest.fixture(scope="module")
def session(corpus, costs):
    return ReplaySession(corpus.trace.select(workload="chat"), costs)


@pytest.fixture(scope="module")
def found(session):
    return run_study("chat", session, StudyConfig(num_trials=40), cost_sha256=COSTS)


def test_baselines_come_first_and_count_as_trials(found):
    trials = found.search.trials
    assert len(trials) == 40
    assert [trial.baseline for trial in trials[:3]] == [
        "plain",
        "best static",
        "price rule at its fixed point, isotonic",
    ]
    assert [candidate.role for candidate in found.baselines] == ["plain", "best_static", "variant"]


def test_best_trial_is_at_least_as_fast_as_the_rule_it_starts_from(found):
    at_fixed_point = found.baselines[-1].outcome.us_per_token
    times = [candidate.outcome.us_per_token for candidate in found.finalists]
    assert times == sorted(times)
    assert times[0] <= at_fixed_point
    feasible = [t.time_per_token_us for t in found.search.trials[2:] if t.time_per_token_us]
    assert times[0] == pytest.approx(min(feasible))


def test_best_static_is_the_best_of_the_grid(session, found):
    best = found.baselines[1]
    assert best.outcome.us_per_token <= found.baselines[0].outcome.us_per_token
    assert session.outcome(best.spec).us_per_token == pytest.approx(best.outcome.us_per_token)


def test_price_is_near_the_throughput_it_leads_to(found):
    price = found.price
    assert price.throughput_tok_per_us == pytest.approx(price.price_tok_per_us, rel=0.02)
    assert price.throughput_tok_per_us >= price.trajectory[0][0]


def test_same_seed_same_trials(session, found):
    again = run_study("chat", session, StudyConfig(num_trials=40), cost_sha256=COSTS)
    assert again.search.trials == found.search.trials
    other = run_study("chat", session, StudyConfig(num_trials=40, seed=1), cost_sha256=COSTS)
    assert other.search.trials != found.search.trials


def test_sensitivity_covers_every_parameter(found):
    names = {importance.param for importance in found.search.importances}
    assert names == set(PricePoint.__slots__)
    assert sum(importance.share for importance in found.search.importances) <= 1 + 1e-9
    for marginal in found.search.marginals:
        assert all(b <= m for b, m in zip(marginal.best_us, marginal.median_us, strict=True))


def test_settings_the_trace_lacks_are_infeasible(corpus, costs, monkeypatch):
    # A space that promises two levels more than were recorded.
    deeper = SearchSpace(max_steps=6, topk=(4,), max_draft_tokens=(16,))
    monkeypatch.setattr(SearchSpace, "covered_by", lambda _trace, _costs: deeper)
    session = ReplaySession(corpus.trace.select(workload="chat"), costs)
    outcome = run_study("chat", session, StudyConfig(num_trials=40), cost_sha256=COSTS)
    times = [trial.time_per_token_us for trial in outcome.search.trials]
    assert 0 < times.count(None) < len(times) - 2
    assert all(c.outcome.uncovered_share <= 0.02 for c in outcome.finalists)


def test_study_names_change_with_every_input(session, corpus, costs):
    space = SearchSpace.covered_by(session.trace, costs)
    config = StudyConfig()
    other_trace = ReplaySession(corpus.trace.select(workload="code"), costs)
    names = {
        study_name("chat", space, session, config, cost_sha256=COSTS),
        study_name("chat", space, session, config, cost_sha256="1" * 64),
        study_name("chat", space, session, StudyConfig(seed=1), cost_sha256=COSTS),
        study_name("chat", space, other_trace, config, cost_sha256=COSTS),
        study_name(
            "chat",
            SearchSpace(max_steps=2, topk=(1,), max_draft_tokens=(4,)),
            session,
            config,
            cost_sha256=COSTS,
        ),
    }
    assert len(names) == 5
    assert study_name("chat", space, session, StudyConfig(num_trials=9), cost_sha256=COSTS) in names


@pytest.mark.parametrize(
    ("size_set", "largest", "expected"),
    [
        ("every", 5, (1, 2, 3, 4, 5)),
        ("powers", 12, (1, 2, 4, 8, 12)),
        ("sparse", 16, (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)),
        ("powers", 2, (1, 2)),
    ],
)
def test_verify_sizes_rise_from_one_to_the_largest(size_set, largest, expected):
    assert verify_sizes(size_set, largest) == expected


def test_space_keeps_to_what_was_measured(corpus, cost_maker):
    space = SearchSpace.covered_by(corpus.trace, cost_maker(largest=12))
    assert space.max_draft_tokens == (4, 8, 12)
    assert space.topk == (1, 2, 4)
    assert space.max_steps == 4


def test_config_names_what_is_wrong():
    with pytest.raises(PolicyConfigError, match="num_trials must be at least 1, got 0"):
        StudyConfig(num_trials=0)


def test_marginals_group_values_and_ranges():
    points = [
        ({"topk": k, "price_ratio": r}, 10.0 * k + r) for k in (4, 2) for r in (0.5, 1.0, 2.0)
    ]
    topk, ratio = marginal_curves(points, ["topk", "price_ratio"])
    assert topk.values == ("2", "4")
    assert topk.best_us == (20.5, 40.5)
    assert topk.median_us == (21.0, 41.0)
    assert len(ratio.values) == 3
    assert ratio.values[0].startswith("0.50 to")
    assert marginal_curves([], ["topk"]) == ()


def test_few_trials_have_no_importances():
    study = optuna.create_study()
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=5)
    assert rank_importances(study, ["x"]) == ()


class _Setting:
    def __init__(self, plain, static):
        self.gain_over_plain = Estimate(value=plain[0], low=plain[1], high=plain[2])
        self.gain_over_best_static = Estimate(value=static[0], low=static[1], high=static[2])


ONE = (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("static_gain", "tuned", "role"),
    [
        ((1.5, 1.4, 1.6), ((1.7, 1.6, 1.8), (1.1, 1.02, 1.2)), "tuned"),
        ((1.5, 1.4, 1.6), ((1.6, 1.5, 1.7), (1.05, 0.99, 1.1)), "best_static"),
        ((1.01, 0.9, 1.1), ((1.02, 0.95, 1.1), (1.01, 0.97, 1.1)), "plain"),
        ((0.9, 0.8, 0.95), ((1.01, 0.99, 1.03), (1.12, 1.05, 1.2)), "plain"),
        ((1.5, 1.4, 1.6), None, "best_static"),
    ],
    ids=["clears", "does-not-clear", "neither", "not-over-plain", "infeasible"],
)
def test_a_setting_is_kept_unless_the_gain_clears_its_interval(static_gain, tuned, role):
    by_role = {"plain": _Setting(ONE, ONE), "best_static": _Setting(static_gain, ONE)}
    if tuned is not None:
        by_role["tuned"] = _Setting(*tuned)
    chosen, reason = choose_setting(by_role)
    assert chosen == role
    assert reason.endswith(".")


def test_held_out_prompts_decide_and_variants_switch_one_decision_off(
    session, found, corpus, costs
):
    held_out = ReplaySession(corpus.trace.select(workload="chat", prompts=range(3)), costs)
    rescored = rescore_workload("chat", found, session, held_out, seed=0)
    tuning = rescored.tuning
    assert tuning.num_held_out_prompts == 3
    roles = [setting.role for setting in tuning.settings]
    assert roles[:3] == ["plain", "best_static", "tuned"]
    assert tuning.chosen.role == tuning.recommended
    tuned = tuning.setting("tuned")
    for variant in tuning.settings[4:]:
        lost = set(tuned.policy.decisions) - set(variant.policy.decisions)
        assert variant.policy.name.removeprefix("tuned without ") in lost
        assert lost <= {variant.policy.name.removeprefix("tuned without "), "speculate"}
    plain = tuning.setting("plain")
    assert plain.gain_over_plain.value == 1.0
    assert isinstance(plain.spec, PlainSpec)
    parts = tuned.step_time
    step_us = parts.draft_extend_us + parts.draft_us + parts.decide_us + parts.verify_us
    assert step_us / tuned.accept_length == pytest.approx(tuned.us_per_token)
