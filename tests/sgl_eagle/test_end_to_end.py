"""The main job through the command line, on models that take a second."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch installed")
pytest.importorskip("transformers", reason="needs transformers installed")

from sgl_eagle.cli import main  # noqa: E402
from sgl_eagle_harness.calibration import load_calibration_file  # noqa: E402
from sgl_eagle_harness.cost_file import load_cost_file  # noqa: E402
from sgl_eagle_harness.policies.policy_file import load_policy_file  # noqa: E402
from sgl_eagle_harness.trace_store import read_dense_trace  # noqa: E402

WORKLOADS = {"chat", "code", "math", "summary", "qa"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(target_folder, good_draft):
    models = ["--target", str(target_folder), "--draft", str(good_draft)]
    return [*models, "--dtype", "float32", "--quiet"]


@pytest.fixture
def run(capsys):
    def run_command(*argv):
        assert main([*map(str, argv), "--format", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run_command


def make_target_passes_dear(cost):
    """A second each, however many tokens: speculation pays whatever else the machine does."""
    payload = json.loads(cost.read_text())
    payload["target"]["us"] = np.full_like(payload["target"]["us"], 1e6).tolist()
    cost.write_text(json.dumps(payload))


def record_split(run, pair, prompt_file, split, out):
    sizes = ["--max-new-tokens", "48", "--num-steps", "4", "--beams", "1,2,4"]
    source = ["--prompts", prompt_file, "--split", split, "--out", out]
    summary = run("record", *source, *sizes, *pair)
    trace = read_dense_trace(out)
    assert summary["num_prompts"] == trace.num_prompts == {"tune": 8, "held_out": 4}[split]
    assert summary["num_positions"] == trace.num_positions
    assert set(trace.prompt_workloads) == {"chat", "code"}
    assert trace.on_path[trace.depths == 1].mean() > 0.1
    return out


def test_record_profile_calibrate_replay_tune_and_validate(run, pair, prompt_file, tmp_path):
    traces = {
        split: record_split(run, pair, prompt_file, split, tmp_path / split)
        for split in ("tune", "held_out")
    }
    cost = tmp_path / "cost.json"
    written = run("profile", "--out", cost, "--repeats", "3", "--context", "1", "80", *pair)
    assert load_cost_file(cost).model_dump(mode="json") == written
    assert written["setup"]["draft"]["name"] == "good"
    assert written["context_len"] == [1, 80]
    assert written["decide_us"] > 0
    assert written["verify_select_us"] > 0
    make_target_passes_dear(cost)

    calibration = tmp_path / "calibration.json"
    judged = run("calibrate", traces["tune"], "--out", calibration)
    assert {each["workload"] for each in judged["held_out"]} >= {"chat", "code"}
    assert load_calibration_file(calibration).draft_sha256 == written["setup"]["draft"]["sha256"]

    policy, result = tmp_path / "policy.json", tmp_path / "tune.json"
    held_out = ["--held-out", traces["held_out"]]
    files = ["--cost", cost, "--out", policy, "--result", result, *held_out]
    tuned = run("tune", traces["tune"], *files, "--trials", "12", "--quiet")
    assert [each["workload"] for each in tuned["workloads"]] == ["chat", "code"]
    assert set(load_policy_file(policy).workloads) == {"chat", "code"}
    assert tuned["gain_over_plain"]["value"] > 1.2
    assert json.loads(result.read_text())["provenance"]["command"]

    policies = ["--policy", "plain", "--policy", "eagle2-4-2-6", "--policy", policy]
    replayed = run("replay", traces["held_out"], "--cost", cost, *policies)
    by_name = {(row["workload"], row["policy"]): row for row in replayed}
    assert len(by_name) == 6
    for workload in ("chat", "code"):
        assert by_name[workload, "plain"]["accept_length"] == 1.0
        assert by_name[workload, "eagle2-4-2-6"]["accept_length"] > 1.5
        assert by_name[workload, str(policy)]["accept_length"] > 1.5

    source = ["--prompts", prompt_file, "--limit", "4", "--max-new-tokens", "48"]
    validated = run("validate", *source, "--cost", cost, *pair)
    for each in validated["policies"]:
        assert each["texts"]["num_equal"] == each["texts"]["num_prompts"] == 8
        assert each["steps"]["num_equal"] == each["steps"]["num_steps"] > 0
    assert {"price", "eagle2-5-4-8", "eagle1-tree"} <= {e["policy"] for e in validated["policies"]}


def test_demo_and_report(run, pair, tmp_path):
    out = tmp_path / "demo"
    sizes = ["--tune-prompts", "3", "--held-out-prompts", "2", "--max-new-tokens", "40"]
    report = run("demo", "--out", out, *sizes, "--trials", "10", *pair)
    assert {each["workload"] for each in report["workloads"]} == WORKLOADS
    for workload in report["workloads"]:
        settings = {setting["role"]: setting for setting in workload["settings"]}
        assert {"plain", "usual", "best_static"} <= settings.keys()
        assert settings["usual"]["accept_length"]["value"] > 1.2
        assert settings["plain"]["measured_tok_per_s"]["value"] > 0
    for check in report["correctness"]:
        assert check["num_equal"] == check["num_compared"]
        # On a pair this small the tuned policy may find that plain decoding is the fastest.
        assert check["num_compared"] > 0 or check["setting"].startswith("tuned")
    assert len({tree["workload"] for tree in report["trees"]}) == 3
    names = {path.name for path in out.iterdir()}
    assert names >= {"cost.json", "policy.json", "traces", "tune.json", "report.json"}

    page = out / "report.html"
    first = page.read_text()
    assert "Speculation settings for target" in first
    again = run("report", out, "--out", tmp_path / "again.html")
    assert again["num_bytes"] == len(first.encode())
    assert (tmp_path / "again.html").read_text() == first

    assert main(["demo", "--out", str(out), *sizes, *pair]) == 2
    assert page.read_text() == first
