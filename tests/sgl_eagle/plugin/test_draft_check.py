"""The start-up check of a draft: faults that SGLang would serve without a word."""

import json
import logging
from pathlib import Path

import pytest

from sgl_eagle_harness.errors import CheckpointError

pytestmark = pytest.mark.reference

VOCAB, DRAFT_VOCAB, HIDDEN, LAYERS = 20, 12, 16, 8
TARGET = {
    "target": Path("no/such/folder"),
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_layers": LAYERS,
}


@pytest.fixture
def write_draft(tmp_path):
    import torch
    from safetensors.torch import save_file

    def write(drop=(), tensors=None, **config):
        torch.manual_seed(0)
        shapes = {
            "midlayer.self_attn.q_proj.weight": (HIDDEN, 2 * HIDDEN),
            "midlayer.self_attn.k_proj.weight": (HIDDEN, 2 * HIDDEN),
            "midlayer.self_attn.v_proj.weight": (HIDDEN, 2 * HIDDEN),
            "midlayer.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            "midlayer.mlp.gate_proj.weight": (24, HIDDEN),
            "midlayer.mlp.up_proj.weight": (24, HIDDEN),
            "midlayer.mlp.down_proj.weight": (HIDDEN, 24),
            "midlayer.hidden_norm.weight": (HIDDEN,),
            "midlayer.input_layernorm.weight": (HIDDEN,),
            "midlayer.post_attention_layernorm.weight": (HIDDEN,),
            "norm.weight": (HIDDEN,),
            "fc.weight": (HIDDEN, 3 * HIDDEN),
            "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        }
        stored = {name: torch.randn(shape) for name, shape in shapes.items()}
        stored["d2t"] = torch.arange(DRAFT_VOCAB) // 2
        stored |= tensors or {}
        save_file(
            {name: tensor for name, tensor in stored.items() if name not in drop},
            tmp_path / "model.safetensors",
        )
        fields = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": 24,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": VOCAB,
            "draft_vocab_size": DRAFT_VOCAB,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
        }
        (tmp_path / "config.json").write_text(json.dumps(fields | config))
        return tmp_path

    return write


def test_a_sound_draft_passes_and_its_capture_layers_are_logged(write_draft, caplog):
    from sgl_eagle.plugin.draft_check import check_draft

    with caplog.at_level(logging.INFO):
        check_draft(write_draft(), **TARGET)
    assert "target layers [1, 3, 4] and proposes 12 of 20 tokens" in caplog.text


def test_a_full_vocabulary_may_borrow_the_targets_head(write_draft):
    from sgl_eagle.plugin.draft_check import check_draft

    check_draft(write_draft(drop=("lm_head.weight", "d2t"), draft_vocab_size=None), **TARGET)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": ("fc.weight",)}, "fc.weight"),
        ({"drop": ("d2t",)}, "no tensor d2t"),
        ({"drop": ("lm_head.weight",)}, "lm_head.weight is missing"),
        ({"vocab_size": 24}, "vocab_size 24 differs from the target's 20"),
        ({"target_hidden_size": 8}, "differs from the target's 16"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 9]}}, "config.json.*9"),
    ],
    ids=["no fc", "no d2t", "no head", "another vocabulary", "another width", "no such layer"],
)
def test_a_silent_failure_is_refused(write_draft, changes, message):
    from sgl_eagle.plugin.draft_check import check_draft

    with pytest.raises(CheckpointError, match=message):
        check_draft(write_draft(**changes), **TARGET)


def test_a_head_that_sglang_would_leave_random_is_refused(write_draft):
    from sgl_eagle.plugin.draft_check import check_draft

    draft = write_draft(drop=("lm_head.weight", "d2t"), draft_vocab_size=VOCAB)
    with pytest.raises(
        CheckpointError, match=r"random start; set draft_vocab_size to null.*got 20"
    ):
        check_draft(draft, **TARGET)


def test_what_cannot_be_read_is_left_to_sglang_and_said(write_draft, caplog):
    from sgl_eagle.plugin.draft_check import check_draft

    check_draft(write_draft(architectures=["SomethingElse"]), **TARGET)
    assert "did not check the draft" in caplog.text


def write_tokenizer(folder, *words):
    from tokenizers import Tokenizer, models

    ids = {word: index for index, word in enumerate(words)}
    folder.mkdir(exist_ok=True)
    Tokenizer(models.WordLevel(ids, unk_token="no")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("words", [("no", "a", "b"), ("no", "a", "b", "c")], ids=["same", "more"])
def test_a_draft_may_bring_the_targets_tokenizer(write_draft, tmp_path, words):
    from sgl_eagle.plugin.draft_check import check_draft

    draft = write_tokenizer(write_draft(), "no", "a", "b")
    check_draft(draft, **TARGET | {"target": write_tokenizer(tmp_path / "target", *words)})


@pytest.mark.parametrize("words", [("no", "b", "a"), ("no", "a", "c")], ids=["order", "word"])
def test_a_draft_of_another_tokenizer_is_refused(write_draft, tmp_path, words):
    from sgl_eagle.plugin.draft_check import check_draft

    draft = write_tokenizer(write_draft(), "no", "a", "b")
    target = write_tokenizer(tmp_path / "target", *words)
    with pytest.raises(CheckpointError, match=r"of 3 tokens in .* have other ids"):
        check_draft(draft, **TARGET | {"target": target})


def test_a_tokenizer_that_cannot_be_read_is_said(write_draft, tmp_path, caplog):
    from sgl_eagle.plugin.draft_check import check_draft

    draft = write_draft()
    (draft / "tokenizer.json").write_text("{}")
    check_draft(draft, **TARGET | {"target": write_tokenizer(tmp_path / "target", "no")})
    assert "did not compare the tokenizers" in caplog.text
