import json
import re

import pytest

torch = pytest.importorskip("torch")

import tiny_models  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from sgl_eagle.reference.draft_checkpoint import load_draft, save_draft  # noqa: E402
from sgl_eagle.reference.draft_config import (  # noqa: E402
    dump_draft_config,
    load_draft_config,
    parse_draft_config,
)
from sgl_eagle.reference.draft_models import build_draft  # noqa: E402
from sgl_eagle_harness.errors import CheckpointError  # noqa: E402

pytestmark = pytest.mark.reference
V, H = 40, 32
RAW = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": H,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": V,
    "fc_norm": True,
    "norm_output": True,
}


def raw_of(architecture):
    switches = {} if architecture.endswith("3") else {"fc_norm": False, "norm_output": False}
    return RAW | {"architectures": [architecture]} | switches


@pytest.fixture
def shared():
    torch.manual_seed(0)
    return {"embed_tokens": torch.randn(V, H), "lm_head": torch.randn(V, H)}


@pytest.fixture
def folder(tmp_path, shared):
    save_draft(
        build_draft(parse_draft_config(RAW, source="test"), **shared),
        tmp_path / "draft",
        dtype=torch.float32,
    )
    return tmp_path / "draft"


def load(folder, shared):
    return load_draft(
        folder, **shared, num_target_layers=8, dtype=torch.float32, device=torch.device("cpu")
    )


def change_weights(folder, change):
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)


def outputs_of(draft):
    torch.manual_seed(3)
    features = torch.randn(2, 3, H * draft.config.num_features)
    tokens = torch.randint(0, V, (2, 3))
    projection = draft.project(draft.fuse(features), tokens, torch.arange(3).expand(2, 3))
    return draft.head(draft.finish(projection.q, projection.residual).head_input)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"])
def test_a_saved_draft_loads_to_the_same_function(tmp_path, shared, architecture):
    config = parse_draft_config(raw_of(architecture), source="test")
    draft = build_draft(config, **shared)
    save_draft(draft, tmp_path, dtype=torch.float32)
    assert load_draft_config(tmp_path) == config
    torch.testing.assert_close(outputs_of(load(tmp_path, shared)), outputs_of(draft))


def test_all_spellings_of_a_checkpoint_are_the_same_draft(folder, shared):
    expected = outputs_of(load(folder, shared))
    legacy = {
        "fc_norm.0": "aux_norm_low",
        "fc_norm.1": "aux_norm_mid",
        "fc_norm.2": "aux_norm_high",
    }

    def respell(tensors):
        renamed = {name.replace("midlayer", "layers.0"): value for name, value in tensors.items()}
        for new, old in legacy.items():
            renamed[f"{old}.weight"] = renamed.pop(f"{new}.weight")
        return {f"model.{name}": value for name, value in renamed.items()}

    change_weights(folder, respell)
    tiny_models.edit_json(folder / "config.json", fc_norm=None, norm_output=None)
    tiny_models.edit_json(
        folder / "config.json", eagle_config={"use_aux_norm": True, "norm_output": True}
    )
    torch.testing.assert_close(outputs_of(load(folder, shared)), expected)


def test_a_reduced_vocabulary_maps_to_target_ids(folder, shared):
    ids = torch.tensor([1, 4, 7, 20, 39])
    tiny_models.edit_json(folder / "config.json", draft_vocab_size=5)
    extra = {"lm_head.weight": torch.randn(5, H), "d2t": ids - torch.arange(5)}
    change_weights(folder, lambda tensors: tensors | extra)
    draft = load(folder, shared)
    assert outputs_of(draft).shape == (2, 3, 5)
    assert draft.to_target_ids(torch.arange(5)).tolist() == ids.tolist()


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def with_tensor(name, *shape):
    return lambda tensors: tensors | {name: torch.zeros(*shape)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("midlayer.mlp.up_proj.weight"), "missing tensors: layers.0.mlp.up_proj.weight"),
        (with_tensor("layers.1.mlp.up_proj.weight", 2), "unexpected tensors: layers.1.mlp.up_proj"),
        (with_tensor("norm.weight", H + 1), r"norm.weight has shape \[33\], expected \[32\]"),
        (with_tensor("lm_head.weight", 7, H), r"lm_head.weight has shape \[7, 32\]"),
        (with_tensor("embed_tokens.weight", 7, H), r"embed_tokens.weight has shape \[7, 32\]"),
    ],
)
def test_weights_that_do_not_fit_are_named(folder, shared, change, message):
    change_weights(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load(folder, shared)


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (None, "no tensor d2t to map"),
        ([0, 0, 0, 0, 99], r"distinct target ids in \[0, 40\)"),
        ([0, -1, 0, 0, 0], "1 repeated"),
    ],
)
def test_a_wrong_vocabulary_mapping_is_refused(folder, shared, d2t, message):
    tiny_models.edit_json(folder / "config.json", draft_vocab_size=5)
    extra = {"lm_head.weight": torch.randn(5, H)}
    if d2t is not None:
        extra["d2t"] = torch.tensor(d2t)
    change_weights(folder, lambda tensors: tensors | extra)
    with pytest.raises(CheckpointError, match=message):
        load(folder, shared)


def test_a_small_head_is_not_borrowed_from_the_target(folder, shared):
    tiny_models.edit_json(folder / "config.json", draft_vocab_size=5)
    change_weights(folder, lambda tensors: tensors | {"d2t": torch.zeros(5, dtype=torch.int64)})
    with pytest.raises(CheckpointError, match=r"lm_head.weight is missing, .* expected \[5, 32\]"):
        load(folder, shared)


def test_truncated_weights_and_missing_files_are_named(folder, shared):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=re.escape(str(file))):
        load(folder, shared)
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin would have to be unpickled"):
        load(folder, shared)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        load(folder, shared)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLMEagle"]}, "belong to EAGLE-3"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures must name one of"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1, got 2"),
        ({"vocab_size": None}, "vocab_size: Field required"),
        ({"vocab_size": 41}, "made for another target"),
        ({"target_hidden_size": 48}, "target_hidden_size"),
        ({"eagle_config": {"norm_befor_fc": True}}, "eagle_config.norm_befor_fc: Extra inputs"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, r"in \[0, 6\]"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type must be one of"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
    ],
)
def test_a_configuration_that_does_not_fit_is_named(folder, shared, changes, message):
    tiny_models.edit_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        load(folder, shared)


def test_captured_layers_are_outputs_of_the_named_layers():
    default = parse_draft_config(RAW, source="test")
    assert default.hidden_state_indices(30) == (2, 15, 27)
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}}
    named = parse_draft_config(RAW | nested, source="test")
    assert named.hidden_state_indices(30) == (2, 15, 27)
    first = parse_draft_config(raw_of("LlamaForCausalLMEagle"), source="test")
    assert first.hidden_state_indices(30) == (30,)


@pytest.mark.parametrize("switches", [{}, {"norm_before_fc": True, "norm_output": False}])
def test_a_configuration_survives_its_own_file(switches):
    config = parse_draft_config(RAW | {"draft_vocab_size": 5} | switches, source="test")
    dumped = json.loads(json.dumps(dump_draft_config(config)))
    assert parse_draft_config(dumped, source="test") == config
