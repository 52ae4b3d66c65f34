"""Every command on input that cannot be used: one line, exit code 1 or 2, nothing half written."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch installed")
pytest.importorskip("transformers", reason="needs transformers installed")

import tiny_models  # noqa: E402

from sgl_eagle.cli import main  # noqa: E402
from sgl_eagle.reference import recorder  # noqa: E402
from sgl_eagle_harness.errors import OutputError  # noqa: E402
from sgl_eagle_harness.output_folder import sole_writer  # noqa: E402
from sgl_eagle_harness.trace_store import read_dense_trace  # noqa: E402

ONE_PROMPT = {"id": "a", "workload": "qa", "turns": ["w1 w2"]}


@pytest.fixture(scope="module")
def pair(target_folder, good_draft):
    models = ["--target", str(target_folder), "--draft", str(good_draft)]
    return [*models, "--dtype", "float32", "--quiet"]


@pytest.fixture(scope="module")
def work(tmp_path_factory, pair, prompt_file):
    """Folder with a recording, its cost table and its policy."""
    folder = tmp_path_factory.mktemp("work")
    traces, cost = str(folder / "traces"), str(folder / "cost.json")
    sizes = ["--max-new-tokens", "24", "--num-steps", "3", "--beams", "1,2"]
    record = ["record", "--prompts", str(prompt_file), "--out", traces, *sizes]
    assert main([*record, *pair]) == 0
    assert main(["profile", "--out", cost, "--repeats", "1", "--context", "1", "40", *pair]) == 0
    policy = ["--out", str(folder / "policy.json"), "--trials", "8", "--quiet"]
    assert main(["tune", traces, "--cost", cost, *policy]) == 0
    return folder


@pytest.fixture
def refused(capsys, tmp_path):
    """Runs a command that must fail in one line, and returns that line."""

    def run(*argv, codes=(1, 2)):
        files = set(tmp_path.rglob("*"))
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in argv])
        except SystemExit as stop:  # argparse
            code = stop.code
        out, err = capsys.readouterr()
        assert code in codes
        assert out == ""
        *before_it, message = err.splitlines()
        assert before_it == [] or before_it[0].startswith("usage: ")
        assert message.startswith(f"sgl-eagle {argv[0]}: error: ")
        assert set(tmp_path.rglob("*")) == files
        return message

    return run


def truncate(path: Path) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


TRACE_COMMANDS = {
    "calibrate": [],
    "replay": ["--policy", "plain"],
    "tune": ["--out", "x.json"],
}


@pytest.mark.parametrize("command", TRACE_COMMANDS)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "missing does not exist"),
        ("empty", "empty holds no trace"),
        ("truncated.parquet", "truncated.parquet is truncated or not a Parquet file"),
        ("text.parquet", "text.parquet is truncated or not a Parquet file"),
    ],
)
def test_traces_that_cannot_be_read(work, tmp_path, refused, command, name, message):
    (tmp_path / "empty").mkdir()
    shard = next((work / "traces").iterdir())
    truncate(Path(shutil.copy(shard, tmp_path / "truncated.parquet")))
    (tmp_path / "text.parquet").write_text("not a table, but a long enough text")
    options = [tmp_path / o if o == "x.json" else o for o in TRACE_COMMANDS[command]]
    cost = [] if command == "calibrate" else ["--cost", work / "cost.json"]
    assert message in refused(command, tmp_path / name, *cost, *options)


COST_COMMANDS = {
    "replay": ["{traces}", "--policy", "plain"],
    "tune": ["{traces}", "--out", "{out}"],
    "validate": ["--prompts", "{prompts}", "{pair}"],
}


@pytest.mark.parametrize("command", COST_COMMANDS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Path.unlink, "cannot read {path}: No such file or directory"),
        (truncate, "{path} is not JSON"),
        (lambda path: tiny_models.edit_json(path, decide_us="x"), "{path}: decide_us: Input sho"),
        (lambda path: tiny_models.edit_json(path, schema_version=9), "{path}: schema_version must"),
        (lambda path: tiny_models.edit_json(path, batch_size=[10**30]), "{path}: batch_size.0: In"),
        (lambda path: path.write_text("[" * 10**5), "{path} is not JSON: maximum recursion depth"),
        (
            lambda path: path.write_text('{"schema_version": 1, "default": {}, "workloads": {}}'),
            "{path} is a file of another kind: it lacks batch_size, context_len, created, "
            "decide_us and 6 more and has default, workloads",
        ),
    ],
    ids=["missing", "truncated", "field", "version", "absurd", "nested", "policy"],
)
def test_cost_tables_that_cannot_be_read(
    work, prompt_file, pair, tmp_path, refused, command, fault, message
):
    path = Path(shutil.copy(work / "cost.json", tmp_path))
    fault(path)
    known = {"{traces}": [work / "traces"], "{prompts}": [prompt_file], "{pair}": pair}
    known["{out}"] = [tmp_path / "x.json"]
    options = [part for word in COST_COMMANDS[command] for part in known.get(word, [word])]
    assert message.format(path=path) in refused(command, *options, "--cost", path)


def test_costs_of_another_machine_may_be_replayed_but_not_run(
    work, prompt_file, pair, tmp_path, refused
):
    payload = json.loads((work / "cost.json").read_text())
    payload["setup"]["device"] = "NVIDIA H200"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(payload))
    message = refused("validate", "--prompts", prompt_file, *pair, "--cost", other)
    assert f"--cost {other}: the cost table was measured on another setup" in message
    assert "device: measured on 'NVIDIA H200', running " in message
    assert main(["replay", str(work / "traces"), "--cost", str(other), "--policy", "plain"]) == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (truncate, "policy.json is not JSON"),
        (lambda path: tiny_models.edit_json(path, schema_version=9), "schema_version must be 1"),
        (lambda path: tiny_models.edit_json(path, default=None), "default: Field required"),
        (Path.unlink, "--policy must be a file, plain, eagle1, chain-STEPS or eagle2-STEPS-TOPK"),
    ],
    ids=["truncated", "version", "field", "missing"],
)
def test_policies_that_cannot_be_read(work, tmp_path, refused, fault, message):
    path = Path(shutil.copy(work / "policy.json", tmp_path))
    fault(path)
    costs = ["--cost", work / "cost.json"]
    assert message in refused("replay", work / "traces", *costs, "--policy", path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chain-99999999999999999999", "num_steps must be in [1, 32], got num_steps=9999"),
        ("eagle2-99-4-8", "--policy eagle2-99-4-8: num_steps must be in [1, 32], got num_steps=99"),
        ("eagle2-5-4-70", "num_draft_tokens must be in [2, 69] for num_steps=5, topk=4"),
        ("eagle2-5-50-8", "topk must be in [1, 32], got topk=50"),
    ],
)
def test_impossible_trees_name_the_largest_legal_value(work, refused, name, message):
    costs = ["--cost", work / "cost.json"]
    assert message in refused("replay", work / "traces", *costs, "--policy", name)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (shutil.rmtree, "--target must be 'smollm2', a directory with config.json or a .gguf file"),
        (lambda path: truncate(path / "model.safetensors"), "cannot load a target from "),
        (lambda path: truncate(path / "config.json"), "cannot load a target from "),
        (lambda path: (path / "tokenizer.json").unlink(), "cannot load a target from "),
        (
            lambda path: tiny_models.edit_tensors(path, model__norm__weight=None),
            "1 tensors of the target are missing, e.g. model.norm.weight",
        ),
        (
            lambda path: tiny_models.edit_json(path / "config.json", vocab_size=10),
            "2 tensors of the target have another shape than its config.json says, e.g. "
            "lm_head.weight: [96, 64], expected [10, 64]",
        ),
        (
            lambda path: tiny_models.edit_json(path / "config.json", num_hidden_layers=7),
            "tensors of the target are not in its configuration, e.g. model.layers.7.",
        ),
        (
            lambda path: (path / "chat_template.jinja").unlink(),
            "the tokenizer of the target model needs a chat template that works",
        ),
        (
            lambda path: (path / "chat_template.jinja").write_text("{{ a.b.c }}"),
            "needs a chat template that works: 'a' is undefined",
        ),
        (
            lambda path: tiny_models.edit_json(path / "config.json", model_type="gpt2"),
            "the checkpoint is incomplete or its config.json is another model's",
        ),
        (
            lambda path: tiny_models.edit_tensors(
                path, model__norm__weight=torch.full((64,), torch.nan)
            ),
            "tensor model.norm.weight holds NaN or infinity, read as float32",
        ),
    ],
    ids=[
        *("missing", "weights", "config", "tokenizer", "tensor", "shape", "layers"),
        *("no-template", "template", "architecture", "nan"),
    ],
)
def test_targets_that_cannot_be_used(
    target_folder, good_draft, prompt_file, tmp_path, refused, fault, message
):
    target = shutil.copytree(target_folder, tmp_path / "model")
    fault(target)
    models = ["--target", target, "--draft", good_draft, "--dtype", "float32"]
    out = ["--prompts", prompt_file, "--out", tmp_path / "out"]
    assert message in refused("record", *models, *out, "--quiet")


def config_with(**changes):
    return lambda path: tiny_models.edit_json(path / "config.json", **changes)


@pytest.mark.parametrize("command", ["record", "profile", "validate", "demo"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (shutil.rmtree, "config.json: cannot be read: No such file"),
        (lambda path: truncate(path / "config.json"), "config.json: not valid JSON"),
        (lambda path: truncate(path / "model.safetensors"), "model.safetensors: cannot be read"),
        (config_with(vocab_size=500), "vocab_size 500 differs from the target's 96"),
    ],
    ids=["missing", "config", "weights", "vocabulary"],
)
def test_drafts_that_cannot_be_used_by_any_command(
    work, target_folder, good_draft, tmp_path, refused, command, fault, message
):
    draft = shutil.copytree(good_draft, tmp_path / "draft")
    fault(draft)
    models = ["--target", target_folder, "--draft", draft, "--dtype", "float32"]
    costs = ["--cost", work / "cost.json"]
    output = costs if command == "validate" else ["--out", tmp_path / "out"]
    assert message in refused(command, *models, *output, "--quiet")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (config_with(target_hidden_size=80, hidden_size=80), "differs from the target's 64"),
        (
            config_with(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 17]}),
            "config.json: eagle_aux_hidden_state_layer_ids must be in [0, 6] for a target of 8",
        ),
        (
            config_with(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
            "config.json: head_dim 16 and rope_parameters ",
        ),
        (config_with(intermediate_size=10**9), "config.json: intermediate_size: Input should be"),
        (lambda path: (path / "config.json").write_text("[" * 10**5), "config.json: not valid JS"),
        (config_with(head_dim=15), "config.json: head_dim 15 and rope_parameters "),
        (
            config_with(num_attention_heads=5),
            "num_attention_heads must be a multiple of num_key_value_heads, got "
            "num_attention_heads=5, num_key_value_heads=2",
        ),
        (
            lambda path: tiny_models.edit_tensors(path, d2t=torch.full((96,), 5)),
            "tensor d2t must map draft ids to distinct target ids in [0, 96), found [5, 100]",
        ),
        (
            lambda path: (path / "config.json").write_text("[]"),
            "config.json: the record: Input sho",
        ),
        (
            lambda path: tiny_models.edit_tensors(path, norm__weight=torch.full((64,), torch.inf)),
            "tensor norm.weight holds NaN or infinity, read as float32",
        ),
    ],
    ids=["hidden", "layers", "rope", "absurd", "nested", "head", "heads", "d2t", "list", "inf"],
)
def test_drafts_of_another_target(
    target_folder, random_draft, prompt_file, tmp_path, refused, fault, message
):
    draft = shutil.copytree(random_draft, tmp_path / "draft")
    fault(draft)
    models = ["--target", target_folder, "--draft", draft, "--dtype", "float32"]
    out = ["--prompts", prompt_file, "--out", tmp_path / "out"]
    assert message in refused("record", *models, *out, "--quiet")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-steps", "99"], "--num-steps must be in [1, 32], got --num-steps=99"),
        (["--beams", "4,2"], "--beams must be distinct, ascending and in [1, 32], got "),
        (["--beams", "1,99"], "--beams must be distinct, ascending and in [1, 32], got "),
        (["--beams", "a"], "error: --beams must be numbers with commas, like 1,2,4,8, got 'a'"),
        (["--temperature", "nan"], "--temperature must be in [0, 10], got nan"),
        (["--top-p", "2"], "--top-p must be in (0, 1], got 2.0"),
        (["--device", "meta"], "--device must be a torch device of this machine, such as cpu or"),
        (["--threads", "9" * 12], "--threads must be in [0, 1024], got 999999999999"),
        (["--device", "nowhere"], "--device must be a torch device of this machine, such as cpu"),
        (["--max-new-tokens", "5000"], "--max-new-tokens must be at most 1017, got 5000"),
        (["--split", "neither"], "--split: invalid choice: 'neither'"),
    ],
    ids=lambda value: "".join(value[:2]) if isinstance(value, list) else "",
)
def test_recordings_that_are_impossible(pair, prompt_file, tmp_path, refused, options, message):
    files = ["--prompts", prompt_file, "--out", tmp_path / "out"]
    assert message in refused("record", *files, *pair, *options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "p.jsonl: holds no prompt"),
        ("{", "p.jsonl, line 1: the line: Invalid JSON"),
        (json.dumps(ONE_PROMPT | {"split": "tune"}), "none of the 1 prompts belongs to the split"),
        (
            json.dumps(ONE_PROMPT | {"turns": ["w1 " * 1010]}),
            "prompt 'a' has 1013 tokens, so that on this target of 1024 positions "
            "--max-new-tokens must be at most 11, got 128",
        ),
        (
            json.dumps(ONE_PROMPT | {"turns": ["w1 " * 2000]}),
            "prompt 'a' has 2003 tokens, but this target has only 1024 positions",
        ),
    ],
    ids=["empty", "json", "split", "long", "too-long"],
)
def test_prompts_that_cannot_be_used(pair, tmp_path, refused, text, message):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    files = ["--prompts", path, "--out", tmp_path / "out", "--split", "held_out"]
    assert message in refused("record", *files, *pair)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "mistyped"], "--text mistyped holds no text-*.safetensors: correct the path"),
        (["--max-length", "9"], "--max-length must be at least 128"),
        (["--lr", "3"], "--lr must be in (0, 1), got 3.0"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_training_that_cannot_start(target_folder, tmp_path, refused, options, message):
    models = ["--target", target_folder, "--out", tmp_path / "head"]
    assert message in refused("train", *models, *options)


@pytest.mark.parametrize("context", [["5", "1"], ["1", "5000"]], ids=" ".join)
def test_profiles_that_are_impossible(pair, tmp_path, refused, context):
    message = refused("profile", "--out", tmp_path / "c.json", *pair, "--context", *context)
    assert "--context must be " in message


def test_contexts_outside_the_cost_table(work, prompt_file, pair, refused):
    files = ["--prompts", prompt_file, "--cost", work / "cost.json", "--max-new-tokens", "60"]
    assert "in the measured range [1, 40]" in refused("validate", *files, *pair, "--limit", "1")


WRITERS = {
    "record": ["--prompts", "{prompts}", "{pair}"],
    "profile": ["{pair}"],
    "calibrate": ["{traces}"],
    "tune": ["{traces}", "--cost", "{cost}"],
    "report": ["{work}"],
    "demo": ["{pair}"],
    "train": ["--target", "{target}"],
}


@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize("name", ["file/below", "/proc/out"], ids=["below a file", "proc"])
def test_outputs_that_cannot_be_written(
    work, prompt_file, pair, target_folder, tmp_path, refused, command, name
):
    (tmp_path / "file").write_text("in place of a folder")
    known = {"{traces}": [work / "traces"], "{prompts}": [prompt_file], "{pair}": pair}
    known |= {"{cost}": [work / "cost.json"], "{work}": [work], "{target}": [target_folder]}
    options = [part for word in WRITERS[command] for part in known.get(word, [word])]
    message = refused(command, *options, "--out", tmp_path / name)
    assert f"--out {tmp_path / name} cannot be written: " in message


def test_inputs_are_never_replaced(work, tmp_path, refused):
    cost, shard = work / "cost.json", next((work / "traces").glob("*.parquet"))
    tune = ["tune", work / "traces", "--cost", cost]
    policy = tmp_path / "policy.json"
    for options, source in (
        (["--out", cost], "--cost"),
        (["--out", policy, "--result", shard], "TRACES"),
        (["--out", policy, "--result", policy], "--out"),
    ):
        message = refused(*tune, *options)
        assert message.endswith(f"{options[-2]} {options[-1]} would replace what {source} names")
    assert "would replace what TRACES names" in refused("calibrate", shard, "--out", shard)
    (work / "report.json").write_text("{}")
    assert "would replace what RUN_DIR" in refused("report", work, "--out", work / "report.json")
    (work / "report.json").unlink()


def test_more_requests_than_the_traces_hold_cost_no_memory(work, refused):
    costs = ["--cost", work / "cost.json", "--policy", "plain", "--batch-size", "9" * 30]
    assert "batch_size must be in the measured range [1, 1]" in refused(
        "replay", work / "traces", *costs
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["factorize", "--smoothing", "nan"], "--smoothing must be finite and above 0, got nan"),
        (["factorize", "--activate", ""], "--activate: '': expected local:TILE:PER_TILE"),
        (["factorize", "--num-steps", "33"], "--num-steps: must be a whole number in [1, 32], got"),
        (["evaluate", "--topk", "200"], "--topk must be in [1, 32], got 200"),
        (["train", "--text", "none", "--lr", "nan"], "--lr must be in (0, 1), got nan"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_head_factors_that_are_impossible(
    target_folder, good_draft, tmp_path, refused, options, message
):
    draft = shutil.copytree(good_draft, tmp_path / "draft")
    models = ["--target", target_folder, "--draft", draft, "--quiet"]
    assert message in refused("head", *options, *models)


def test_a_folder_that_holds_something_is_refused(pair, target_folder, tmp_path, refused):
    (tmp_path / "notes").touch()
    models = [part for part in pair if part not in ("--dtype", "float32")]
    commands = {
        "demo": models,
        "export": ["--target", target_folder],
        "inflate": ["--target", target_folder],
    }
    for command, options in commands.items():
        message = refused(command, "--out", tmp_path, *options, codes=(2,))
        assert f"--out {tmp_path} is not empty: choose another" in message


def test_a_file_that_an_option_names_is_replaced(work, pair, tmp_path):
    traces, cost = work / "traces", work / "cost.json"
    commands = {
        "calibrate": [traces],
        "profile": ["--repeats", "1", "--context", "1", "40", *pair],
        "tune": [traces, "--cost", cost, "--trials", "8", "--quiet"],
    }
    for command, options in commands.items():
        out = tmp_path / f"{command}.json"
        out.write_text("not JSON")
        assert main([command, *map(str, options), "--out", str(out)]) == 0
        json.loads(out.read_text())


def test_recording_never_overwrites_another(work, prompt_file, pair, refused):
    files = ["--prompts", prompt_file, "--out", work / "traces"]
    assert "holds a recording already" in refused("record", *files, *pair)


def test_a_folder_that_another_command_fills_is_refused(
    pair, target_folder, prompt_file, tmp_path, refused
):
    models = [part for part in pair if part not in ("--dtype", "float32")]
    commands = {
        "record": ["--prompts", prompt_file, *pair],
        "demo": ["--overwrite", *models],
        "train": ["--target", target_folder, "--device", "cpu", "--quiet"],
    }
    out = tmp_path / "out"
    with sole_writer(out):
        for command, options in commands.items():
            message = refused(command, "--out", out, *options)
            assert f"{out} is being filled by another command" in message


def test_training_on_a_part_of_a_text_is_refused(target_folder, tmp_path, refused):
    for name in ("text-3-0000.safetensors", "text-3.unfinished"):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / name).touch()
    message = refused("train", "--target", target_folder, "--out", tmp_path)
    assert f"{tmp_path / 'text'} holds only a part of the text of seed 3" in message
    assert "write it with `sgl-eagle train --text-only --seed 3`" in message


@contextmanager
def tiny_disk(monkeypatch):
    """No file may grow beyond a kilobyte: what a full disk does, for one process.

    Not a fixture: it would still hold when the outcome of the test is written to a log.
    """
    # The import system would leave modules behind that are cut off and never compiled again.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_named_and_holds_nothing_half_written(
    work, pair, prompt_file, tmp_path, refused, monkeypatch
):
    sizes = ["--max-new-tokens", "8", "--num-steps", "2", "--beams", "1,2"]
    traces = [work / "traces"]
    commands = {
        "record": ["--prompts", prompt_file, *sizes, *pair],
        "profile": ["--repeats", "1", "--context", "1", "40", *pair],
        "calibrate": traces,
        "tune": [*traces, "--cost", work / "cost.json", "--trials", "2", "--quiet"],
    }
    for command, options in commands.items():
        with tiny_disk(monkeypatch):
            message = refused(command, *options, "--out", tmp_path / "out")
        assert f"cannot write {tmp_path}" in message
        assert "File too large" in message


def test_weights_for_which_there_is_no_room_leave_the_older_ones(
    target_folder, good_draft, tmp_path, refused, monkeypatch
):
    draft = shutil.copytree(good_draft, tmp_path / "draft", copy_function=os.link)
    factors = ["head", "factorize", "--method", "svd", "--rank", "16"]
    with tiny_disk(monkeypatch):
        message = refused(*factors, "--target", target_folder, "--draft", draft, "--quiet")
    assert "factors.safetensors: " in message
    from sgl_eagle.reference.draft_checkpoint import load_draft_config, save_draft
    from sgl_eagle.reference.draft_models import build_draft

    before = {path.name: path.stat().st_mtime_ns for path in draft.iterdir()}
    model = tiny_models.make_target()
    borrowed = {"embed_tokens": model.model.embed_tokens.weight, "lm_head": model.lm_head.weight}
    unsaved = build_draft(load_draft_config(draft), **borrowed)
    failure = pytest.raises(OutputError, match=r"cannot write .*model\.safetensors: ")
    with tiny_disk(monkeypatch), failure:
        save_draft(unsaved, draft)
    assert {path.name: path.stat().st_mtime_ns for path in draft.iterdir()} == before


def test_replay_of_more_than_was_recorded_says_so(work, capsys):
    files = [str(work / "traces"), "--cost", str(work / "cost.json")]
    assert main(["replay", *files, "--policy", "chain-3", "--policy", "chain-9"]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert len(warnings) == 2  # one for each workload
    assert all("chain-9: in " in line for line in warnings)
    assert all("record with more --num-steps or --beams" in line for line in warnings)


@pytest.fixture(scope="module")
def foreign(work, target_folder, random_draft, prompt_file):
    """A recording of another draft."""
    folder = work / "foreign"
    sizes = ["--max-new-tokens", "8", "--num-steps", "3", "--beams", "1,2", "--quiet"]
    files = ["--prompts", prompt_file, "--out", folder]
    models = ["--target", target_folder, "--draft", random_draft, "--dtype", "float32"]
    assert main([str(part) for part in ["record", *files, *models, *sizes]]) == 0
    return folder


def test_traces_of_different_drafts_are_never_joined(work, foreign, tmp_path, refused):
    both = "were recorded differently: draft: good ("
    files = ["--cost", work / "cost.json", "--out", tmp_path / "x.json"]
    assert both in refused("tune", work / "traces", foreign, *files)
    assert both in refused("tune", work / "traces", "--held-out", foreign, *files)
    assert both in refused("calibrate", work / "traces", foreign)


def test_policy_and_costs_of_another_draft_are_refused(work, foreign, refused):
    files = [foreign, "--cost", work / "cost.json"]
    message = refused("replay", *files, "--policy", work / "policy.json")
    assert "policy.json: tuned for the draft good (" in message
    message = refused("replay", *files, "--policy", "plain")
    assert "the cost table was measured with the draft good (" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read {path}: No such file"),
        ('{"a":', "{path} is not JSON"),
        ("{}", "{path}: schema_version must be 1"),
    ],
    ids=["missing", "truncated", "empty"],
)
def test_reports_that_cannot_be_read(tmp_path, refused, content, message):
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    assert message.format(path=path) in refused("report", tmp_path)


def test_debug_shows_where_it_failed(work, capsys):
    assert main(["calibrate", str(work / "none"), "--debug"]) == 1
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last == f"sgl-eagle calibrate: error: trace {work / 'none'} does not exist"


def test_interrupt_between_prompts_keeps_those_that_were_finished(
    pair, prompt_file, tmp_path, monkeypatch, capsys
):
    finished = []

    def record_two(*args, **kwargs):
        if len(finished) == 2:
            raise KeyboardInterrupt
        finished.append(None)
        return record_text(*args, **kwargs)

    record_text = recorder.record_text
    monkeypatch.setattr(recorder, "record_text", record_two)
    out = tmp_path / "out"
    sizes = ["--max-new-tokens", "8", "--num-steps", "2", "--beams", "1,2"]
    assert main(["record", "--prompts", str(prompt_file), "--out", str(out), *sizes, *pair]) == 130
    assert f"{out} holds the 2 prompts that were done" in capsys.readouterr().err
    assert read_dense_trace(out).prompt_ids == ["chat-0", "chat-1"]


def test_interrupt_while_writing_loses_nothing(pair, prompt_file, tmp_path, monkeypatch):
    calls = []

    def interrupted_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        write(*args)

    write = recorder.write_dense_shard
    monkeypatch.setattr(recorder, "write_dense_shard", interrupted_once)
    out = tmp_path / "out"
    sizes = ["--max-new-tokens", "8", "--num-steps", "2", "--beams", "1,2", "--rows", "3"]
    assert main(["record", "--prompts", str(prompt_file), "--out", str(out), *sizes, *pair]) == 130
    assert read_dense_trace(out).num_prompts == 3


def test_ctrl_c_keeps_what_was_finished(pair, tmp_path):
    # So many that the command cannot end before a test that waits long for its turn.
    num_prompts = 500
    prompts = tiny_models.write_prompts(tmp_path / "p.jsonl", num_prompts=num_prompts)
    out = tmp_path / "out"
    sizes = ["--max-new-tokens", "400", "--num-steps", "4", "--beams", "1,2,4", "--rows", "1"]
    command = [sys.executable, "-m", "sgl_eagle.cli", "record", "--prompts", str(prompts)]
    process = subprocess.Popen(
        [*command, "--out", str(out), *sizes, *pair],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        # A shell's background jobs, this one perhaps, ignore it, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 300
    while not list(out.glob("*.parquet")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=300)[1]
    assert process.returncode == 130
    assert err.splitlines()[-1] == "sgl-eagle record: interrupted"
    assert "Traceback" not in err
    trace = read_dense_trace(out)
    assert 1 <= trace.num_prompts < num_prompts
    assert f"holds the {trace.num_prompts} prompts that were done" in err
    assert {path.suffix for path in out.iterdir()} == {".parquet"}
