"""A target and its draft at a larger model's cost, written as folders that engines load.

The pair says the same and accepts the same, so a serving benchmark has real text and real
acceptance at the cost of a model that was never trained. How the weights grow is in
`inflate_weights`.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from sgl_eagle.reference.draft_checkpoint import published_name, read_tensors
from sgl_eagle.reference.draft_config import DraftConfig, load_draft_config
from sgl_eagle.reference.draft_tokenizer import TOKENIZER_FILE
from sgl_eagle.reference.head_checkpoint import CONFIG_KEY, HeadConfig
from sgl_eagle.reference.inflate_weights import Inflation, ModelSizes
from sgl_eagle.reference.loading import LoadedTarget
from sgl_eagle.reference.target import LLAMA_FAMILY
from sgl_eagle_harness.errors import CheckpointError, OutputError

SHARD_BYTES = 4 << 30

NamedTensors = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InflateConfig:
    """What the larger pair is like.

    Attributes:
        sizes: Of both models, none smaller than it is now.
        num_layers: Decoder layers of the target, no fewer than now; added ones pass their input on.
        dtype: Of the weights on disk.
        device: Where they are made; random numbers are many times faster on a GPU.
        seed: Of the random weights.
    """

    sizes: ModelSizes
    num_layers: int
    dtype: torch.dtype
    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InflatedPair:
    """What was written.

    Attributes:
        target: Folder.
        draft: Folder.
        num_target_parameters: Embedding included, counted once where the LM head is tied to it.
        num_draft_parameters: Of the draft's own tensors.
    """

    target: Path
    draft: Path
    num_target_parameters: int
    num_draft_parameters: int


def inflate_pair(
    loaded: LoadedTarget, draft: Path, out: Path, config: InflateConfig, *, quiet: bool = False
) -> InflatedPair:
    """Write the larger pair to `out/target` and `out/draft`; `out` appears when both are whole.

    Args:
        loaded: The target.
        draft: Folder of its EAGLE draft.
        out: Missing, or empty.
        config: What it is to be like.
        quiet: Show no progress.

    Returns:
        Folders and parameter counts.

    Raises:
        CheckpointError: If a size would shrink, heads find no place, the draft is not as wide as
            the target, or a model is outside of the Llama family.
        OutputError: If the folder cannot be written.
    """
    draft_config = load_draft_config(draft)
    _require_fitting_pair(loaded, config.num_layers, draft, draft_config)
    random = torch.Generator(config.device).manual_seed(config.seed)
    target_inflation, draft_inflation = (
        Inflation(_sizes_of(old), config.sizes, model=model, dtype=config.dtype, random=random)
        for old, model in ((loaded.model.config, "target"), (draft_config, "draft"))
    )
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        try:
            (partial / "target").mkdir(parents=True)
            with tqdm(desc="inflate", unit=" tensors", disable=quiet) as bar:
                target_tensors = _target_tensors(loaded, config.num_layers, target_inflation)
                num_target = _save_shards(_counted(target_tensors, bar), partial / "target")
                draft_tensors = _draft_tensors(draft, draft_config, draft_inflation)
                num_draft = _save_shards(_counted(draft_tensors, bar), partial / "draft")
            _save_target_settings(loaded, config, partial / "target")
            raw = json.loads((draft / "config.json").read_text("utf-8"))
            _save_factors(raw, draft, draft_inflation, partial / "draft")
            num_old_layers = loaded.model.config.num_hidden_layers
            grown = _draft_settings(raw, draft_config, num_old_layers, config)
            (partial / "draft" / "config.json").write_text(
                json.dumps(grown, indent=2) + "\n", "utf-8"
            )
            if (draft / TOKENIZER_FILE).is_file():
                shutil.copy(draft / TOKENIZER_FILE, partial / "draft")
            partial.replace(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{out}: cannot be written: {error}") from error
    return InflatedPair(
        target=out / "target",
        draft=out / "draft",
        num_target_parameters=num_target,
        num_draft_parameters=num_draft,
    )


def _require_fitting_pair(
    loaded: LoadedTarget, num_layers: int, draft: Path, draft_config: DraftConfig
) -> None:
    config = loaded.model.config
    if config.model_type not in LLAMA_FAMILY:
        raise CheckpointError(
            f"{loaded.name}: only targets of {', '.join(LLAMA_FAMILY)} can be inflated, "
            f"got model_type={config.model_type!r}"
        )
    if num_layers < config.num_hidden_layers:
        raise CheckpointError(
            f"num_layers must be at least the target's {config.num_hidden_layers}, "
            f"got num_layers={num_layers}"
        )
    if {draft_config.hidden_size, draft_config.target_hidden_size} != {config.hidden_size}:
        # Its norms would need one epsilon for its own width and another for the target's.
        raise CheckpointError(
            f"{draft}: only a draft as wide as its target can be inflated, got hidden_size "
            f"{draft_config.hidden_size} and target_hidden_size {draft_config.target_hidden_size} "
            f"for a target of {config.hidden_size}"
        )


def _sizes_of(config: Any) -> ModelSizes:  # noqa: ANN401  a target's or a draft's, alike in names
    return ModelSizes(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
    )


def _target_tensors(loaded: LoadedTarget, num_layers: int, inflation: Inflation) -> NamedTensors:
    tied = loaded.model.config.tie_word_embeddings
    last = loaded.model.config.num_hidden_layers - 1
    prefix = f"model.layers.{last}."
    of_last_layer = []
    for name, tensor in loaded.model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        if name.startswith(prefix):
            of_last_layer.append((name.removeprefix(prefix), tensor))
        yield name, inflation.enlarge(name, tensor)
    for layer in range(last + 1, num_layers):
        for name, tensor in of_last_layer:
            yield f"model.layers.{layer}.{name}", inflation.enlarge_identity(name, tensor)


def _draft_tensors(draft: Path, config: DraftConfig, inflation: Inflation) -> NamedTensors:
    for name, tensor in read_tensors(draft).items():
        yield published_name(name, config), inflation.enlarge(name, tensor)


def _counted(tensors: NamedTensors, bar: tqdm[Any]) -> NamedTensors:
    for item in tensors:
        yield item
        bar.update()


def _save_shards(tensors: NamedTensors, folder: Path) -> int:
    # Tensors are written as they come, an index beside them; the result is their parameter count.
    folder.mkdir(exist_ok=True)
    shard: dict[str, Tensor] = {}
    files: dict[str, str] = {}
    num_parameters = num_bytes = shard_bytes = 0

    def flush() -> None:
        nonlocal shard, shard_bytes
        file = f"model-{len(set(files.values())) + 1:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, file))
        shard, shard_bytes = {}, 0

    for name, tensor in tensors:
        if shard and shard_bytes + tensor.nbytes > SHARD_BYTES:
            flush()
        shard[name] = tensor.cpu().contiguous()
        shard_bytes += tensor.nbytes
        num_bytes += tensor.nbytes
        num_parameters += tensor.numel() if tensor.is_floating_point() else 0
    flush()
    index = {"metadata": {"total_size": num_bytes}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), "utf-8")
    return num_parameters


def _save_target_settings(loaded: LoadedTarget, config: InflateConfig, folder: Path) -> None:
    old, sizes = loaded.model.config, config.sizes
    new = copy.deepcopy(old)
    new.head_dim = getattr(old, "head_dim", None) or old.hidden_size // old.num_attention_heads
    new.rms_norm_eps = old.rms_norm_eps * old.hidden_size / sizes.hidden_size
    new.hidden_size = sizes.hidden_size
    new.intermediate_size = sizes.intermediate_size
    new.num_attention_heads = sizes.num_heads
    new.num_key_value_heads = sizes.num_kv_heads
    new.num_hidden_layers = config.num_layers
    kinds = getattr(old, "layer_types", None)
    if kinds is not None:
        new.layer_types = [*kinds, *kinds[-1:] * (config.num_layers - len(kinds))]
    new.dtype = config.dtype
    new.save_pretrained(folder)
    loaded.model.generation_config.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def _draft_settings(
    raw: dict[str, Any], old: DraftConfig, num_target_layers: int, config: InflateConfig
) -> dict[str, Any]:
    # Of the file as it was, so that keys which only other engines read stay.
    sizes = config.sizes
    new = raw | {
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": old.head_dim,
        "rms_norm_eps": old.rms_norm_eps * old.hidden_size / sizes.hidden_size,
        "target_hidden_size": sizes.hidden_size,
        "torch_dtype": str(config.dtype).removeprefix("torch."),
    }
    if old.kind == "eagle3":
        # Left out, they would follow from the new number of layers.
        layers = [index - 1 for index in old.hidden_state_indices(num_target_layers)]
        nested = {"eagle_aux_hidden_state_layer_ids": layers}
        new["eagle_config"] = (raw.get("eagle_config") or {}) | nested
    return new


def _save_factors(raw: dict[str, Any], draft: Path, inflation: Inflation, folder: Path) -> None:
    if CONFIG_KEY not in raw:
        return
    name = HeadConfig.model_validate(raw[CONFIG_KEY]).factors
    with safe_open(draft / name, "pt") as file:
        metadata = file.metadata()
        tensors = {
            key: inflation.enlarge_factor(key, file.get_tensor(key)).contiguous()
            for key in file.keys()  # noqa: SIM118 (no dict)
        }
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name, metadata=metadata)
