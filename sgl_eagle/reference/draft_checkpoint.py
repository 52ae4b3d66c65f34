"""EAGLE draft weights on disk: safetensors laid out as in SafeAILab/EAGLE, SpecForge and SGLang."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sgl_eagle.reference.draft_config import DraftConfig, dump_draft_config, load_draft_config
from sgl_eagle.reference.draft_models import Draft, build_draft
from sgl_eagle.reference.finite_weights import require_finite
from sgl_eagle.reference.tensor_file import save_tensors
from sgl_eagle_harness.atomic_file import replace_when_done
from sgl_eagle_harness.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"
# `t2d` is the inverse of `d2t`; old exports also carry the rotary frequencies.
_IGNORED = re.compile(r"(^|\.)(t2d|rotary_emb\.inv_freq)$")
_LEGACY_NAMES = {
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
_BORROWED = ("embed_tokens.weight", "lm_head.weight", "d2t")


def load_draft(
    path: Path,
    *,
    embed_tokens: Tensor,
    lm_head: Tensor,
    num_target_layers: int,
    dtype: torch.dtype,
    device: torch.device,
    int8: bool = False,
) -> Draft:
    """Load a draft checkpoint for a given target.

    Args:
        path: Folder with `config.json` and one or more `model*.safetensors` files.
        embed_tokens: [V, H] of the target, used unless the checkpoint has its own.
        lm_head: [V, H] of the target, likewise.
        num_target_layers: Decoder layers of the target.
        dtype: Of the weights in memory.
        device: Where they go.
        int8: Multiply with weights of the layer that are rounded to eight bits.

    Returns:
        The draft, in evaluation mode, without gradients, with its full head.

    Raises:
        CheckpointError: If a file is missing or damaged, or a tensor is missing, unexpected, of
            another shape than the configuration says, not finite, or does not fit the target.
    """
    config = load_draft_config(path)
    try:
        config.hidden_state_indices(num_target_layers)
    except CheckpointError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}") from error
    _require_target(config, path, embed_tokens)
    tensors = read_tensors(path)
    require_finite(path, tensors, dtype)
    own_embedding = _take(tensors, "embed_tokens.weight", path, embed_tokens.shape)
    embedding = own_embedding if own_embedding is not None else embed_tokens
    mapping = _draft_to_target(tensors, config, path)
    head = _choose_head(tensors, config, path, embedding, lm_head)
    try:
        draft = build_draft(
            config,
            embed_tokens=embedding.to(device, dtype),
            lm_head=head.to(device, dtype),
            draft_to_target=None if mapping is None else mapping.to(device),
            eagle1_input_layernorm="layers.0.input_layernorm.weight" in tensors,
        )
    except CheckpointError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}") from error
    expected = export_tensors(draft)
    _require_same_tensors(expected, tensors, path)
    _import_tensors(draft, tensors)
    draft = draft.to(device=device, dtype=dtype).eval().requires_grad_(False)
    draft.pack(int8=int8)
    return draft


def save_draft(draft: Draft, path: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a trained draft that borrows the target's embedding and head.

    Args:
        draft: Any draft without a reduced vocabulary.
        path: Folder, made if missing.
        dtype: Of the weights on disk.

    Raises:
        OutputError: If the folder cannot be written.
    """
    tensors = {
        published_name(name, draft.config): tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in export_tensors(draft).items()
    }
    settings = json.dumps(dump_draft_config(draft.config), indent=2) + "\n"
    with replace_when_done(path / "config.json") as config:  # neither file without the other
        config.write_text(settings, "utf-8")
        save_tensors(path / WEIGHTS_FILE, tensors, metadata={"format": "pt"})


def export_tensors(draft: Draft) -> dict[str, Tensor]:
    """The weights under the names of one decoder layer, fused projections taken apart.

    Args:
        draft: Any draft.

    Returns:
        Views of the draft's parameters, named as SGLang names them (`layers.0.*`, `fc`, `norm`).
    """
    top = ("fc.", "fc_norm.", "input_norm.", "norm.")
    attention = ("o_proj.",)
    named: dict[str, Tensor] = {}
    for name, tensor in draft.named_parameters():
        if name == "qkv_proj.weight":
            sizes = _qkv_sizes(draft.config)
            for part, piece in zip(("q", "k", "v"), torch.split(tensor, sizes), strict=True):
                named[f"layers.0.self_attn.{part}_proj.weight"] = piece
        elif name == "gate_up_proj.weight":
            gate, up = tensor.chunk(2)
            named |= {
                "layers.0.mlp.gate_proj.weight": gate,
                "layers.0.mlp.up_proj.weight": up,
            }
        elif name.startswith(top):
            named[name] = tensor
        elif name.startswith(attention):
            named[f"layers.0.self_attn.{name}"] = tensor
        elif name.startswith("down_proj."):
            named[f"layers.0.mlp.{name}"] = tensor
        else:
            named[f"layers.0.{name}"] = tensor
    return named


def _qkv_sizes(config: DraftConfig) -> list[int]:
    kv_size = config.num_key_value_heads * config.head_dim
    return [config.num_attention_heads * config.head_dim, kv_size, kv_size]


def published_name(name: str, config: DraftConfig) -> str:
    """The name under which a tensor is stored.

    Args:
        name: One of `export_tensors`.
        config: Of the draft.

    Returns:
        The name in the file.
    """
    if config.kind == "eagle3":
        return re.sub(r"^layers\.0\.", "midlayer.", name)
    return name


def _import_tensors(draft: Draft, tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, view in export_tensors(draft).items():
            view.copy_(tensors[name])


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the weights of a checkpoint as they are stored.

    Args:
        path: Folder with one or more `model*.safetensors` files.

    Returns:
        Tensors under the names of `export_tensors`, with `embed_tokens.weight`, `lm_head.weight`
        and `d2t` where the checkpoint has them.

    Raises:
        CheckpointError: If there is no such file, one is damaged, or a name occurs twice.
    """
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        found = sorted(file.name for file in path.glob("*.bin"))
        hint = f"; {', '.join(found)} would have to be unpickled, convert it" if found else ""
        raise CheckpointError(f"{path}: no model*.safetensors file{hint}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            part = load_file(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{file}: cannot be read, truncated?: {error}") from error
        for raw_name, tensor in part.items():
            name = _plain_name(raw_name)
            if name in tensors:
                raise CheckpointError(f"{file}: tensor {raw_name} occurs twice in {path}")
            if not _IGNORED.search(name):
                tensors[name] = tensor
    return tensors


def _plain_name(name: str) -> str:
    name = re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))
    for legacy, modern in _LEGACY_NAMES.items():
        if name.startswith(legacy):
            return modern + name.removeprefix(legacy)
    return name


def _require_target(config: DraftConfig, path: Path, embed_tokens: Tensor) -> None:
    vocab_size, hidden = embed_tokens.shape
    if config.vocab_size != vocab_size:
        raise CheckpointError(
            f"{path / 'config.json'}: vocab_size {config.vocab_size} differs from the target's "
            f"{vocab_size}: the draft was made for another target"
        )
    if config.target_hidden_size != hidden:
        raise CheckpointError(
            f"{path / 'config.json'}: target_hidden_size (hidden_size when absent) "
            f"{config.target_hidden_size} differs from the target's {hidden}: the draft was made "
            f"for another target"
        )


def _take(
    tensors: dict[str, Tensor], name: str, path: Path, shape: tuple[int, ...]
) -> Tensor | None:
    tensor = tensors.pop(name, None)
    if tensor is not None and tensor.shape != torch.Size(shape):
        raise CheckpointError(
            f"{path}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}"
        )
    return tensor


def _draft_to_target(tensors: dict[str, Tensor], config: DraftConfig, path: Path) -> Tensor | None:
    offsets = _take(tensors, "d2t", path, (config.draft_vocab_size,))
    if offsets is None:
        if config.draft_vocab_size < config.vocab_size:
            raise CheckpointError(
                f"{path}: draft_vocab_size {config.draft_vocab_size} is below vocab_size "
                f"{config.vocab_size}, but there is no tensor d2t to map draft ids to target ids"
            )
        return None
    ids = torch.arange(config.draft_vocab_size) + offsets.long()
    repeated = ids.numel() - len(set(ids.tolist()))
    if ids.min() < 0 or ids.max() >= config.vocab_size or repeated:
        raise CheckpointError(
            f"{path}: tensor d2t must map draft ids to distinct target ids in "
            f"[0, {config.vocab_size}), found [{int(ids.min())}, {int(ids.max())}] with "
            f"{repeated} repeated"
        )
    return ids


def _choose_head(
    tensors: dict[str, Tensor],
    config: DraftConfig,
    path: Path,
    embedding: Tensor,
    target_head: Tensor,
) -> Tensor:
    shape = (config.draft_vocab_size, config.hidden_size)
    own = _take(tensors, "lm_head.weight", path, shape)
    if own is not None:
        return own
    borrowed, owner = (
        (embedding, "embed_tokens.weight")
        if config.tie_word_embeddings
        else (target_head, "target")
    )
    if borrowed.shape != torch.Size(shape):
        raise CheckpointError(
            f"{path}: tensor lm_head.weight is missing, and the head of {owner} cannot stand in: "
            f"it has shape {list(borrowed.shape)}, expected {list(shape)}"
        )
    return borrowed


def _require_same_tensors(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], path: Path
) -> None:
    missing = sorted(expected.keys() - found.keys())
    unexpected = sorted(found.keys() - expected.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"{path}: missing tensors: {', '.join(missing) or 'none'}; "
            f"unexpected tensors: {', '.join(unexpected) or 'none'} (`layers.0.` is also spelled "
            f"`midlayer.`)"
        )
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(found[name].shape)}, expected "
                f"{list(tensor.shape)}"
            )
