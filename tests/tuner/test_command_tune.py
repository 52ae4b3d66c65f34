import json
import logging

import optuna
import pytest

from sgl_eagle.cli import main
from sgl_eagle_harness.cost_file import CostFile, save_cost_file
from sgl_eagle_harness.policies.policy_file import load_policy_file
from sgl_eagle_tuner.search_space import SearchSpace
from sgl_eagle_tuner.tune_result import load_tune_result


@pytest.fixture(scope="module")
def shards(record, tmp_path_factory):
    corpus = record(tmp_path_factory.mktemp("shards"), num_prompts=9)
    return [str(path) for path in corpus.paths]


@pytest.fixture(scope="module")
def cost_path(cost_maker, tmp_path_factory, created):
    path = tmp_path_factory.mktemp("cost") / "cost.json"
    table = cost_maker(batch_sizes=(1, 2, 4))
    save_cost_file(path, CostFile.from_table(table, num_repeats=3, created=created))
    return str(path)


@pytest.fixture(scope="module")
def tuned(shards, cost_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    out, result = folder / "policy.json", folder / "tune.json"
    files = ["--cost", cost_path, "--out", str(out), "--result", str(result)]
    assert main(["tune", *shards, *files, "--trials", "30", "--quiet"]) == 0
    return out, result


def test_policy_file_holds_the_recommended_policy_of_every_workload(tuned):
    policy, result = load_policy_file(tuned[0]), load_tune_result(tuned[1])
    assert list(policy.workloads) == ["chat", "code"]
    for workload in result.workloads:
        assert policy.workloads[workload.workload] == workload.chosen.spec
    assert policy.default == policy.workloads[result.default_workload]
    assert policy.cost_sha256 == result.cost_sha256
    assert [file.name for file in policy.provenance.traces] == ["chat.parquet", "code.parquet"]


def test_same_seed_same_policy(tuned, shards, cost_path, tmp_path, capsys):
    out = tmp_path / "again.json"
    files = ["--cost", cost_path, "--out", str(out), "--format", "json"]
    assert main(["tune", *shards, *files, "--trials", "30", "--quiet"]) == 0
    first, second = load_policy_file(tuned[0]), load_policy_file(out)
    assert second.workloads == first.workloads
    summary = json.loads(capsys.readouterr().out)
    assert [w["workload"] for w in summary["workloads"]] == ["chat", "code"]
    assert summary["gain_over_plain"]["value"] > 1


def test_replay_agrees_with_what_tune_predicts(shards, cost_path, tmp_path, record, capsys):
    held_out = record(tmp_path, num_prompts=4, seed=0, first_prompt=20)
    out, result = tmp_path / "policy.json", tmp_path / "tune.json"
    paths = [str(path) for path in held_out.paths]
    files = ["--cost", cost_path, "--out", str(out), "--result", str(result)]
    assert main(["tune", *shards, *files, "--trials", "12", "--held-out", *paths, "--quiet"]) == 0
    capsys.readouterr()
    policies = ["--policy", "plain", "--policy", str(out)]
    assert main(["replay", *paths, "--cost", cost_path, *policies, "--format", "json"]) == 0
    rows = {(row["workload"], row["policy"]): row for row in json.loads(capsys.readouterr().out)}
    for workload in load_tune_result(result).workloads:
        chosen = rows[workload.workload, str(out)]
        assert chosen["tok_per_s"]["value"] == pytest.approx(workload.chosen.tok_per_s.value)
        assert chosen["accept_length"] == pytest.approx(workload.chosen.accept_length)
        plain = rows[workload.workload, "plain"]
        assert plain["accept_length"] == 1.0
        assert plain["tok_per_s"]["value"] == pytest.approx(
            workload.setting("plain").tok_per_s.value
        )


def test_a_batch_is_tuned_by_simulation(shards, cost_path, tmp_path):
    out, result = tmp_path / "policy.json", tmp_path / "tune.json"
    files = ["--cost", cost_path, "--out", str(out), "--result", str(result)]
    options = ["--batch-size", "4", "--trials", "8", "--workload", "chat", "--quiet"]
    assert main(["tune", *shards, *files, *options]) == 0
    found = load_tune_result(result)
    assert found.batch_size == 4
    assert [w.workload for w in found.workloads] == ["chat"]


def test_storage_resumes_the_same_study_and_starts_anew_on_other_inputs(
    shards, cost_path, tmp_path, capsys
):
    storage = ["--storage", f"sqlite:///{tmp_path}/study.db", "--workload", "chat"]
    files = ["--cost", cost_path, "--out", str(tmp_path / "policy.json")]
    options = [*shards, *files, *storage]
    assert main(["tune", *options, "--trials", "8"]) == 0
    assert "tune: 8 trials in" in capsys.readouterr().err
    assert main(["tune", *options, "--trials", "8"]) == 0
    assert "resuming study chat-" in capsys.readouterr().err
    assert main(["tune", *options, "--trials", "8", "--seed", "1"]) == 0
    assert "have changed: starting study chat-" in capsys.readouterr().err


def test_an_interrupted_search_is_one_line(shards, cost_path, tmp_path, capsys, monkeypatch):
    trials = []

    def interrupted(space, trial):
        trials.append(trial)
        if len(trials) == 3:
            raise KeyboardInterrupt
        return suggest(space, trial)

    suggest = SearchSpace.suggest
    monkeypatch.setattr(SearchSpace, "suggest", interrupted)
    logged = []
    handler = logging.Handler()
    handler.emit = logged.append
    logging.getLogger("optuna").addHandler(handler)
    out, storage = tmp_path / "policy.json", f"sqlite:///{tmp_path / 'study.db'}"
    files = ["--cost", cost_path, "--out", str(out), "--storage", storage]
    try:
        assert main(["tune", *shards, *files, "--trials", "9", "--quiet"]) == 130
    finally:
        logging.getLogger("optuna").removeHandler(handler)
    assert capsys.readouterr().err == "sgl-eagle tune: interrupted\n"
    assert [record for record in logged if record.levelno >= logging.WARNING] == []
    assert not out.exists()
    (name,) = optuna.get_all_study_names(storage)
    states = [trial.state for trial in optuna.load_study(study_name=name, storage=storage).trials]
    assert states[trials[-1].number] == optuna.trial.TrialState.FAIL
    assert optuna.trial.TrialState.RUNNING not in states


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--storage", "nonsense"], 1, "--storage 'nonsense' cannot be used"),
        (["--uncovered-limit", "2"], 2, "--uncovered-limit must be in [0, 1), got 2.0"),
        (["--workload", "poetry"], 1, "'poetry'"),
        (["--batch-size", "8"], 1, "batch_size"),
    ],
    ids=["storage", "limit", "workload", "batch"],
)
def test_bad_options_fail_in_one_line(shards, cost_path, tmp_path, capsys, options, code, message):
    out = tmp_path / "policy.json"
    files = ["--cost", cost_path, "--out", str(out)]
    assert main(["tune", *shards, *files, "--trials", "5", *options, "--quiet"]) == code
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not out.exists()


def test_held_out_prompts_must_be_others(shards, cost_path, tmp_path, capsys):
    files = ["--cost", cost_path, "--out", str(tmp_path / "policy.json")]
    assert main(["tune", *shards, *files, "--held-out", *shards]) == 1
    assert "held-out prompts must not be tuned on" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["eagle3", "missing.json", "eagle2-1-1-9"])
def test_unknown_or_impossible_policies_are_refused(shards, cost_path, capsys, policy):
    assert main(["replay", *shards, "--cost", cost_path, "--policy", policy]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_replay_prints_a_table_and_its_own_speed(shards, cost_path, capsys, monkeypatch):
    monkeypatch.setattr("sgl_eagle.cli.replay.BENCHMARK_SECONDS", 0.01)
    options = ["--policy", "eagle1", "--policy", "chain-3", "--workload", "code", "--benchmark"]
    assert main(["replay", *shards, "--cost", cost_path, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("positions/s")
    assert [line.split()[1] for line in lines[2:]] == ["eagle1", "chain-3"]


def test_sampled_text_has_an_expected_accept_length(record, tmp_path, cost_path, capsys):
    sampled = record(tmp_path, workloads=("chat",), temperature=1.0)
    options = ["--cost", cost_path, "--policy", "eagle2-4-4-16", "--format", "json"]
    assert main(["replay", str(sampled.paths[0]), *options]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["expected_accept_length"] == pytest.approx(row["accept_length"], rel=0.25)
    assert row["expected_accept_length"] > 1.5


def test_a_draft_that_is_never_right_is_named(record, tmp_path, cost_path, capsys):
    language = record(tmp_path, workloads=("chat",), num_prompts=3, always_wrong=True)
    files = ["--cost", cost_path, "--out", str(tmp_path / "policy.json")]
    assert main(["tune", str(language.paths[0]), *files]) == 1
    assert "no drafted node of the trace is ever right" in capsys.readouterr().err


def test_costs_of_other_models_are_refused(shards, cost_path, tmp_path, capsys):
    payload = json.loads((tmp_path.parent / cost_path).read_text())
    payload["setup"]["draft"]["sha256"] = "f" * 64
    other = tmp_path / "other.json"
    other.write_text(json.dumps(payload))
    assert main(["replay", *shards, "--cost", str(other), "--policy", "plain"]) == 1
    assert "measured with the draft markov-draft (ffffffffffff)" in capsys.readouterr().err
