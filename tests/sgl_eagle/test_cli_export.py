"""`sgl-eagle export`: the folder holds the same model, and appears whole or not at all."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from sgl_eagle.cli import main
from sgl_eagle.reference.export_target import export_target
from sgl_eagle.reference.loading import load_target
from sgl_eagle_harness.errors import OutputError

CHAT = [{"role": "user", "content": "w1 w2 w3"}]


def weights(loaded):
    return {name: tensor.float() for name, tensor in loaded.model.state_dict().items()}


def require_same(found, wanted):
    found_weights, wanted_weights = weights(found), weights(wanted)
    assert found_weights.keys() == wanted_weights.keys()
    assert all(torch.equal(found_weights[name], wanted_weights[name]) for name in wanted_weights)
    assert found.model.config.rope_parameters == wanted.model.config.rope_parameters
    assert found.tokenizer.get_vocab() == wanted.tokenizer.get_vocab()
    templates = [
        loaded.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
        for loaded in (found, wanted)
    ]
    assert templates[0] == templates[1]


def test_the_folder_holds_the_same_model(target_folder, tmp_path, capsys):
    out = tmp_path / "new" / "target"
    arguments = ["export", "--target", str(target_folder), "--out", str(out), "--format", "json"]
    assert main([*arguments, "--dtype", "float32"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["out"] == str(out)
    found, wanted = (load_target(str(path), dtype=torch.float32) for path in (out, target_folder))
    assert result["num_parameters"] == sum(tensor.numel() for tensor in wanted.model.parameters())
    require_same(found, wanted)
    assert [path.name for path in out.parent.iterdir()] == ["target"]


def test_weights_are_stored_in_the_chosen_type(target_folder, tmp_path):
    out = str(tmp_path / "target")
    assert main(["export", "--target", str(target_folder), "--out", out]) == 0
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.reference
@pytest.mark.slow
def test_a_gguf_model_becomes_a_folder_that_loads(tmp_path):
    out = tmp_path / "target"
    assert main(["export", "--target", "smollm2", "--out", str(out)]) == 0
    found, wanted = (load_target(name, dtype=torch.bfloat16) for name in (str(out), "smollm2"))
    require_same(found, wanted)


def test_a_folder_in_use_is_left_alone(target_folder, tmp_path, capsys):
    (tmp_path / "notes").touch()
    assert main(["export", "--target", str(target_folder), "--out", str(tmp_path)]) == 2
    assert f"--out {tmp_path} is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_a_link_to_an_empty_folder_is_filled_and_the_current_one_is_not(
    target_folder, tmp_path, capsys, monkeypatch
):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    export = ["export", "--target", str(target_folder), "--out"]
    assert main([*export, str(tmp_path / "link")]) == 0
    assert (tmp_path / "real" / "config.json").is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main([*export, "."]) == 2
    assert "--out . is the current folder" in capsys.readouterr().err


def test_a_file_that_is_no_model_is_named(tmp_path, capsys):
    bad = tmp_path / "model.gguf"
    bad.write_bytes(b"GGUF, but nothing after it")
    assert main(["export", "--target", str(bad), "--out", str(tmp_path / "out")]) == 1
    assert f"cannot load a target from {bad}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_stays_of_an_export_that_fails(target_folder, tmp_path):
    class FullDisk:
        def save_pretrained(self, _folder):
            raise OSError(28, "No space left on device")

    loaded = load_target(str(target_folder), dtype=torch.float32)
    with pytest.raises(OutputError, match=r"target: cannot be written: \[Errno 28\] No space left"):
        export_target(replace(loaded, tokenizer=FullDisk()), tmp_path / "target")
    assert list(tmp_path.iterdir()) == []
