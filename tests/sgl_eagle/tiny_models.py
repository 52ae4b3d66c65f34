"""A target and drafts small enough to run every command in seconds, as folders on disk.

The target nearly maps each word to the next one of a long cycle: its layers are too weak to change
that often. So a draft that knows the cycle is right most of the time, and text never repeats itself
soon.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NUM_LAYERS = 8
HIDDEN = 64
LAYER_STRENGTH = 8
SPECIAL = ("<end>", "<unk>", "<user>", "<bot>")
WORDS = (*SPECIAL, *(f"w{index}" for index in range(92)))
CHAT_TEMPLATE = (
    "{% for message in messages %}<user> {{ message['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
WORKLOADS = ("chat", "code")


def write_target(folder: Path, *, layer_strength: float = LAYER_STRENGTH) -> Path:
    """Save the target and its tokenizer in Hugging Face format."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    make_target(layer_strength=layer_strength).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_target(*, layer_strength: float = LAYER_STRENGTH, **changes: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(WORDS),
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    model = LlamaForCausalLM(LlamaConfig(**(sizes | changes))).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.normal_(std=layer_strength / HIDDEN**0.5)
            layer.mlp.down_proj.weight.normal_(std=layer_strength / HIDDEN**0.5)
        embedding = torch.randn(len(WORDS), HIDDEN)
        embedding *= HIDDEN**0.5 / embedding.norm(dim=-1, keepdim=True)
        model.model.embed_tokens.weight.copy_(embedding)
        cycle = len(SPECIAL) + torch.randperm(len(WORDS) - len(SPECIAL))
        model.lm_head.weight.zero_()
        model.lm_head.weight[cycle.roll(-1)] = embedding[cycle] * 0.1
        model.lm_head.weight[cycle[0]] += embedding[: len(SPECIAL)].sum(dim=0) * 0.1
    return model


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<bot>"],
        chat_template=CHAT_TEMPLATE,
    )


def write_good_draft(folder: Path) -> Path:
    """Save an EAGLE-1 draft that knows the cycle: its feature is the last word's embedding."""
    import torch

    def know_the_cycle(draft: Any) -> None:
        for parameter in draft.parameters():  # nothing may look as freshly initialised
            parameter.copy_(torch.randn(parameter.shape) * 0.03 + (parameter.ndim == 1))
        draft.fc.weight[:, :HIDDEN] += torch.eye(HIDDEN)
        draft.fc.bias.mul_(0.01)
        draft.o_proj.weight.mul_(0.1)
        draft.down_proj.weight.mul_(0.1)

    return write_draft(folder, kind="eagle1", change=know_the_cycle)


def write_draft(folder: Path, *, kind: str = "eagle3", change: Any = None) -> Path:
    """Save a draft for the target; random but for what `change` does to it."""
    import torch

    from sgl_eagle.reference.draft_checkpoint import save_draft
    from sgl_eagle.reference.draft_models import build_draft
    from sgl_eagle.reference.train import draft_config_for

    model = make_target()
    torch.manual_seed(1)
    draft = build_draft(
        draft_config_for(model.config, kind=kind, intermediate_size=96),
        embed_tokens=model.model.embed_tokens.weight.detach(),
        lm_head=model.lm_head.weight.detach(),
    )
    with torch.no_grad():
        if change is not None:
            change(draft)
    save_draft(draft, folder, dtype=torch.float32)
    return folder


def write_prompts(path: Path, *, num_prompts: int = 6) -> Path:
    """A prompt file of two workloads, some of each held out."""
    lines = [
        {
            "id": f"{workload}-{index}",
            "workload": workload,
            "split": "held_out" if index % 3 == 2 else "tune",
            "turns": [f"w{7 * index + offset} w{3 * index + 1} w{index} what"],
        }
        for offset, workload in enumerate(WORKLOADS)
        for index in range(num_prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def edit_json(path: Path, **changes: Any) -> None:
    """Change top-level keys of a JSON file; None removes one."""
    payload = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in payload.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")


def edit_tensors(folder: Path, **changes: Any) -> None:
    """Replace tensors of a draft; None removes one."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, file)
