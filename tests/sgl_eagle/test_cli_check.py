"""`sgl-eagle check`: each silent failure, planted in a draft that is good otherwise."""

import json
import shutil

import pytest

torch = pytest.importorskip("torch", reason="needs torch installed")
pytest.importorskip("transformers", reason="needs transformers installed")

import tiny_models  # noqa: E402

from sgl_eagle.cli import main  # noqa: E402
from sgl_eagle.reference import verify  # noqa: E402
from sgl_eagle.reference.check_weights import untrained_reason  # noqa: E402

NUM_WORDS = len(tiny_models.WORDS)


@pytest.fixture
def check(target_folder, prompt_file, capsys):
    """Runs the command and returns its exit code and its rows by name."""

    def run(draft, *options, target=target_folder):
        files = [str(draft), "--target", str(target), "--prompts", str(prompt_file)]
        code = main(
            ["check", *files, "--dtype", "float32", "--limit", "2", "--format", "json", *options]
        )
        result = json.loads(capsys.readouterr().out)
        assert result["passed"] == (code == 0)
        return code, {row["name"]: row for row in result["checks"]}

    return run


@pytest.fixture
def copy(tmp_path):
    def copy_of(folder):
        return shutil.copytree(folder, tmp_path / "draft")

    return copy_of


def outcomes(rows):
    return {name: row["outcome"] for name, row in rows.items() if row["outcome"] != "ok"}


def test_good_draft_passes_without_a_warning(check, good_draft):
    code, rows = check(good_draft)
    assert (code, outcomes(rows)) == (0, {})
    assert "vocab_size" in rows["config keys"]["found"]
    assert "final norm (8)" in rows["capture layers"]["found"]
    assert rows["head"]["found"] == "embedding: shared; LM head: shared"


def test_untrained_draft_fails_or_is_warned_of(check, random_draft):
    _, rows = check(random_draft)
    assert rows["weight values"]["outcome"] == "warning"
    assert rows["weight values"]["found"].startswith("15 of 15 tensors look untrained")
    assert rows["accept length"]["outcome"] in {"failed", "warning"}
    assert rows["capture layers"]["found"] == "outputs of layers 1, 3, 4 of 8, as config.json says"


def test_draft_that_never_hits_fails(check, copy, good_draft):
    draft = copy(good_draft)
    tiny_models.edit_tensors(draft, lm_head__weight=torch.zeros(NUM_WORDS, tiny_models.HIDDEN))
    code, rows = check(draft, "--topk", "2")
    assert code == 1
    assert outcomes(rows) == {"weight values": "warning", "accept length": "failed"}
    assert "no draft was ever accepted" in rows["accept length"]["found"]
    assert "LM head: its own, [96, 64]" in rows["head"]["found"]


def test_engine_that_reads_the_wrong_node_fails(check, good_draft, monkeypatch):
    sound = verify.walk_tree
    monkeypatch.setattr(
        verify, "walk_tree", lambda tree, logits, *rest: sound(tree, logits.roll(1, 0), *rest)
    )
    code, rows = check(good_draft)
    assert (code, rows["greedy text"]["outcome"]) == (1, "failed")
    assert "differ where it does not (first: chat-0, token " in rows["greedy text"]["found"]


def test_accept_length_at_its_maximum_is_warned_of(check, good_draft, tmp_path):
    target = tiny_models.write_target(tmp_path / "target", layer_strength=0.1)
    code, rows = check(good_draft, target=target)
    assert (code, outcomes(rows)) == (0, {"accept length": "warning"})
    assert rows["accept length"]["found"].endswith("every draft was accepted")


@pytest.mark.parametrize(
    ("changes", "expected", "message"),
    [
        ({"hidden_size": None}, {"config": "failed"}, "hidden_size: Field required"),
        ({"norm_befor_fc": True}, {"config keys": "warning"}, "ignored: norm_befor_fc"),
        ({"max_position_embeddings": 128}, {"positions": "warning"}, "draft 128, target 1024"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            {"rotary embedding": "warning"},
            "draft rope_theta 500.0",
        ),
        (
            {"vocab_size": 97},
            {"vocabulary": "failed", "weights": "failed"},
            "vocab_size is 97, the target's 96",
        ),
        (
            {"draft_vocab_size": 40},
            {"weights": "failed"},
            "draft_vocab_size 40 is below vocab_size 96, but there is no tensor d2t",
        ),
    ],
    ids=lambda value: "/".join(value) if isinstance(value, dict) else "",
)
def test_faults_of_the_configuration(check, copy, good_draft, changes, expected, message):
    draft = copy(good_draft)
    tiny_models.edit_json(draft / "config.json", **changes)
    code, rows = check(draft)
    found = outcomes(rows)
    assert code == int("failed" in expected.values())
    assert expected.items() <= found.items()
    assert found.keys() - expected.keys() <= {"smoke run"}
    assert any(message in row["found"] for row in rows.values())
    assert all(row["fix"] for row in rows.values() if row["outcome"] in {"failed", "warning"})


@pytest.mark.parametrize(
    ("layers", "outcome", "message"),
    [
        ([1, 3, 7], "failed", "must be in [0, 6] for a target of 8 layers, got [1, 3, 7]"),
        ([1, 3, 3], "warning", "layers 1, 3, 3 of 8: one is captured twice"),
    ],
    ids=str,
)
def test_capture_layers(check, copy, random_draft, layers, outcome, message):
    draft = copy(random_draft)
    nested = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
    tiny_models.edit_json(draft / "config.json", eagle_config=nested)
    _, rows = check(draft)
    assert rows["capture layers"]["outcome"] == outcome
    assert message in rows["capture layers"]["found"]


def test_missing_and_unexpected_tensors_are_both_named(check, copy, good_draft):
    draft = copy(good_draft)
    tiny_models.edit_tensors(draft, fc__weight=None, extra=torch.ones(3))
    code, rows = check(draft)
    assert code == 1
    assert "missing tensors: fc.weight; unexpected tensors: extra" in rows["weights"]["found"]
    assert rows["smoke run"]["outcome"] == "not checked"


@pytest.mark.parametrize(
    ("tensor", "name", "message"),
    [
        (torch.full((96, 64), torch.nan), "weight values", "NaN or infinity in layers.0.mlp.up_pr"),
        (torch.ones(96, 64, dtype=torch.int8), "dtype", "layers.0.mlp.up_proj.weight stored as in"),
    ],
    ids=["nan", "quantised"],
)
def test_broken_tensors_fail(check, copy, good_draft, tensor, name, message):
    draft = copy(good_draft)
    tiny_models.edit_tensors(draft, layers__0__mlp__up_proj__weight=tensor)
    code, rows = check(draft)
    assert code == 1
    assert rows[name]["outcome"] == "failed"
    assert message in rows[name]["found"]


def test_weights_too_large_for_the_chosen_type_fail(check, copy, good_draft):
    draft = copy(good_draft)
    tiny_models.edit_tensors(draft, fc__bias=torch.full((64,), 1e6))
    assert check(draft)[1]["weight values"]["outcome"] == "warning"
    code, rows = check(draft, "--dtype", "float16")
    assert code == 1
    assert rows["weight values"]["found"] == "NaN or infinity in fc.bias, read as float16"


@pytest.mark.parametrize(
    ("kept", "outcome"), [(NUM_WORDS - 1, "ok"), (NUM_WORDS // 2, "warning")], ids=str
)
def test_reduced_vocabulary_is_measured_on_text(check, copy, good_draft, kept, outcome):
    draft = copy(good_draft)
    tiny_models.edit_json(draft / "config.json", draft_vocab_size=kept)
    head = tiny_models.make_target().lm_head.weight.detach()[:kept].clone()
    tiny_models.edit_tensors(draft, d2t=torch.zeros(kept, dtype=torch.int64), lm_head__weight=head)
    _, rows = check(draft)
    assert rows["draft vocabulary"]["outcome"] == outcome
    assert rows["draft vocabulary"]["found"].startswith(f"{kept} tokens, which cover ")


def test_tokenizer_that_came_with_the_draft_must_agree(check, copy, good_draft, target_folder):
    draft = copy(good_draft)
    shutil.copy(target_folder / "tokenizer.json", draft)
    assert outcomes(check(draft)[1]) == {}
    text = (draft / "tokenizer.json").read_text()
    (draft / "tokenizer.json").write_text(text.replace('"w3"', '"w0_"').replace('"w0"', '"w3"'))
    code, rows = check(draft)
    assert (code, outcomes(rows)) == (1, {"tokenizer": "failed"})
    assert "have other ids in the target" in rows["tokenizer"]["found"]


def test_missing_draft_and_target_are_both_reported(check, tmp_path):
    code, rows = check(tmp_path / "none", target=tmp_path / "nowhere")
    assert code == 1
    assert outcomes(rows) == {
        "config": "failed",
        "weights file": "failed",
        "target": "failed",
        "smoke run": "not checked",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--num-draft-tokens", "100"],
            "--num-draft-tokens must be in [2, 69] for --num-steps=5, --topk=4",
        ),
        (["--num-steps", "99"], "--num-steps must be in [1, 32], got --num-steps=99"),
        (["--topk", "40"], "--topk must be in [1, 32], got --topk=40"),
        (["--device", "cuda:77"], "--device must be a torch device of this machine"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_impossible_settings_name_flag_and_limit(good_draft, capsys, options, message):
    assert main(["check", str(good_draft), *options]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert message in err


def test_setting_that_drafts_in_vain_is_warned_of(check, good_draft):
    code, rows = check(good_draft, "--num-steps", "4", "--topk", "1", "--num-draft-tokens", "4")
    assert (code, rows["tree"]["outcome"]) == (0, "warning")
    assert rows["tree"]["fix"] == "give --num-draft-tokens at least 5, since the root counts"


def test_text_says_what_to_do(target_folder, random_draft, prompt_file, capsys):
    files = [str(random_draft), "--target", str(target_folder), "--prompts", str(prompt_file)]
    main(["check", *files, "--dtype", "float32", "--quiet"])
    lines = capsys.readouterr().out.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("warning     weight"))
    assert lines[at + 1].strip().startswith("-> make sure that this is the trained checkpoint")
    assert lines[-1].endswith(" warnings")


def test_what_looks_untrained():
    torch.manual_seed(0)
    linear = torch.nn.Linear(200, 300).weight.detach()
    assert "torch.nn.Linear" in untrained_reason(linear)
    assert untrained_reason(linear + 0.02 * torch.randn(300, 200)) is None
    assert "transformers" in untrained_reason(0.02 * torch.randn(300, 200))
    assert untrained_reason(0.03 * torch.randn(300, 200)) is None
    assert untrained_reason(torch.ones(5)) == "every value is 1"
    assert untrained_reason(torch.tensor([1.0, 1.1])) is None
