"""A target of four layers and a hand-made EAGLE-3 head that is often right about it.

The target's text is mostly a chain of bigrams, disturbed by its layers; the head knows the bigrams.
Neither was trained. Runs in the fork server, or by itself: python tiny_pair.py FOLDER
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, HIDDEN, INTERMEDIATE, HEADS = 1024, 128, 256, 4
DRAFT_VOCABULARY = 768
HEAD_NOISE = 0.6
LAYER_SPREAD = 0.105
"""Half of the next tokens are the bigrams; a wrongly visible token changes one choice in five."""
SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_pair(folder):
    folder = Path(folder)
    torch.manual_seed(0)
    target = _make_target(folder / "target")
    _make_tokenizer().save_pretrained(folder / "target")
    _make_draft(folder / "draft", target)


def _make_tokenizer():
    tokenizer = Tokenizer(models.BPE(unk_token=None, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    corpus = [Path(module.__file__).read_text(encoding="utf-8") for module in (os, json)]
    tokenizer.train_from_iterator(corpus, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def _make_target(folder):
    config = LlamaConfig(
        num_hidden_layers=4, num_key_value_heads=2, initializer_range=LAYER_SPREAD, **SHARED
    )
    target = LlamaForCausalLM(config).float()
    with torch.no_grad():
        embedding = target.model.embed_tokens.weight.normal_(0, 1)
        target.lm_head.weight[torch.randperm(VOCABULARY)] = embedding / HIDDEN**0.5
    target.save_pretrained(folder)
    return target


def _make_draft(folder, target):
    generator = torch.Generator().manual_seed(1)
    kept = torch.randperm(VOCABULARY, generator=generator)[:DRAFT_VOCABULARY].sort().values
    head = target.lm_head.weight.detach()
    noise = torch.randn(head.shape, generator=generator) * head.std()
    one, none = torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    zeros = torch.zeros(INTERMEDIATE, HIDDEN)
    # The embedding of the last token goes through attention that looks mostly at itself.
    tensors = {
        "midlayer.self_attn.q_proj.weight": torch.cat([3 * one, none], 1),
        "midlayer.self_attn.k_proj.weight": torch.cat([3 * one, none], 1),
        "midlayer.self_attn.v_proj.weight": torch.cat([one, none], 1),
        "midlayer.self_attn.o_proj.weight": one.clone(),
        "midlayer.mlp.gate_proj.weight": zeros,
        "midlayer.mlp.up_proj.weight": zeros.clone(),
        "midlayer.mlp.down_proj.weight": zeros.T.clone(),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.post_attention_layernorm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "fc.weight": torch.randn(HIDDEN, 3 * HIDDEN, generator=generator) * 0.01,
        "lm_head.weight": (head + HEAD_NOISE * noise)[kept],
        "d2t": kept - torch.arange(DRAFT_VOCABULARY),
        "t2d": torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, kept, value=True),
    }
    folder.mkdir(parents=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = {
        **SHARED,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": DRAFT_VOCABULARY,
        "num_hidden_layers": 1,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        # Four layers have too few for SGLang's default of an early, a middle and a late one.
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


if __name__ == "__main__":
    make_pair(sys.argv[1])
