import json

import pytest

from sgl_eagle.cli import main
from sgl_eagle_harness.calibration import load_calibration_file


@pytest.fixture(scope="module")
def shards(record, tmp_path_factory):
    corpus = record(tmp_path_factory.mktemp("shards"), num_prompts=9, length=60)
    return [str(path) for path in corpus.paths]


def test_writes_a_map_and_scores_it_on_held_out_prompts(shards, tmp_path, capsys):
    out = tmp_path / "calibration.json"
    assert main(["calibrate", *shards, "--out", str(out), "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    everything, chat, code = result["held_out"]
    assert [everything["workload"], chat["workload"], code["workload"]] == ["all", "chat", "code"]
    assert everything["num_prompts"] == 6
    assert everything["num_nodes"] == chat["num_nodes"] + code["num_nodes"]
    # The second workload's draft is far blurrier than it believes.
    assert code["after"]["ece"] < 0.5 * code["before"]["ece"]
    record = load_calibration_file(out)
    assert record.calibration.kind == "isotonic"
    assert record.workloads == ("chat", "code")


@pytest.mark.parametrize("kind", ["identity", "temperature", "isotonic"])
def test_text_names_every_score(shards, capsys, kind):
    assert main(["calibrate", *shards, "--kind", kind, "--workload", "code"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["workload", "confidence", "ECE", "Brier", "AUC", "nodes", "prompts"]
    assert [line.split()[:2] for line in lines[2:]] == [
        ["all", "identity"],
        ["all", kind],
        ["code", "identity"],
        ["code", kind],
    ]


def test_a_missing_trace_and_an_unwritable_output_fail_in_one_line(shards, tmp_path, capsys):
    assert main(["calibrate", str(tmp_path / "none.parquet")]) == 1
    assert main(["calibrate", *shards, "--out", str(tmp_path)]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "none.parquet" in errors[0]
    assert "--out" in errors[1]


def test_one_prompt_cannot_be_split(record, tmp_path, capsys):
    corpus = record(tmp_path, num_prompts=1)
    assert main(["calibrate", *map(str, corpus.paths)]) == 1
    assert "workload 'chat' needs at least 2 prompts" in capsys.readouterr().err
