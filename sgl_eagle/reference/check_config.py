"""A draft's configuration against its target's: what loads without complaint and drafts nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgl_eagle.reference.check_row import CheckRow, failed, ok, warning
from sgl_eagle.reference.draft_config import USED_KEYS, DraftConfig
from sgl_eagle.reference.draft_tokenizer import TOKENIZER_FILE, differing_tokens, read_vocabulary
from sgl_eagle.reference.head_checkpoint import CONFIG_KEY
from sgl_eagle.reference.loading import LoadedTarget
from sgl_eagle_harness.errors import CheckpointError
from sgl_eagle_harness.types import TreeLimits

BOOKKEEPING_KEYS = frozenset({
    "_name_or_path", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "initializer_range", "model_type", "pad_token_id", "pretraining_tp", "torch_dtype",
    "transformers_version", "use_cache",
})  # fmt: skip
"""Keys of a Hugging Face configuration that change nothing of what a draft computes."""


def check_keys(path: Path) -> CheckRow:
    """List which keys are used and which are not.

    An ignored key is how a norm gets skipped or a layer list is lost: the draft then loads and
    drafts badly.

    Args:
        path: Folder of a checkpoint whose `config.json` can be read.

    Returns:
        A warning where a key is unknown.
    """
    raw: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    known = USED_KEYS | {CONFIG_KEY}
    used = sorted(raw.keys() & known)
    unknown = sorted(raw.keys() - known - BOOKKEEPING_KEYS)
    nested = raw.get("eagle_config") or {}
    found = f"used: {', '.join([*used, *(f'eagle_config.{key}' for key in nested)])}"
    if not unknown:
        return ok("config keys", found)
    return warning(
        "config keys",
        f"{found}; ignored: {', '.join(unknown)}",
        "make sure that the draft was trained without what the ignored keys say",
    )


def check_against_target(config: DraftConfig, draft: Path, loaded: LoadedTarget) -> list[CheckRow]:
    """Compare everything that a draft and its target must share.

    Args:
        config: The draft's.
        draft: Folder of its checkpoint.
        loaded: The target.

    Returns:
        One row for each comparison.
    """
    target = loaded.model.config
    return [
        _capture_layers(config, target.num_hidden_layers),
        _hidden_size(config, target.hidden_size),
        _vocabulary(config, target.vocab_size),
        _tokenizer(draft, loaded),
        _positions(config, target.max_position_embeddings),
        _rotary(config, dict(target.rope_parameters or {})),
    ]


def check_tree(limits: TreeLimits, draft_vocab_size: int) -> CheckRow:
    """Judge a setting that is possible.

    Args:
        limits: The setting.
        draft_vocab_size: Tokens that the draft can propose.

    Returns:
        A warning where drafted nodes can never be accepted.
    """
    found = (
        f"{limits.num_steps} steps of topk {limits.topk} draft "
        f"{limits.largest_num_draft_tokens - 1} nodes at most, of which "
        f"{limits.num_draft_tokens - 1} are verified beside the root"
    )
    if limits.topk > draft_vocab_size:
        return failed(
            "tree",
            f"topk {limits.topk} is above draft_vocab_size {draft_vocab_size}",
            f"give --topk at most {draft_vocab_size}",
        )
    if limits.num_draft_tokens <= limits.num_steps:
        return warning(
            "tree",
            f"{found}: no path of {limits.num_steps} fits",
            f"give --num-draft-tokens at least {limits.num_steps + 1}, since the root counts",
        )
    return ok("tree", found)


def _capture_layers(config: DraftConfig, num_layers: int) -> CheckRow:
    name = "capture layers"
    try:
        indices = config.hidden_state_indices(num_layers)
    except CheckpointError as error:
        return failed(name, str(error), "use the target that the draft was trained for")
    if config.kind == "eagle1":
        return ok(name, f"the target's last hidden state, after its final norm ({num_layers})")
    layers = ", ".join(str(index - 1) for index in indices)
    if len(set(indices)) < len(indices):
        return warning(
            name,
            f"outputs of layers {layers} of {num_layers}: one is captured twice",
            "fine if the draft was trained so; otherwise correct "
            "eagle_aux_hidden_state_layer_ids in the draft's config.json",
        )
    if config.aux_layer_ids is not None:
        return ok(name, f"outputs of layers {layers} of {num_layers}, as config.json says")
    return ok(name, f"outputs of layers {layers} of {num_layers}, the default; none in config.json")


def _hidden_size(config: DraftConfig, target_size: int) -> CheckRow:
    name = "hidden size"
    if config.target_hidden_size != target_size:
        return failed(
            name,
            f"the draft reads features of {config.target_hidden_size}, the target gives "
            f"{target_size}",
            "use the target that the draft was trained for",
        )
    return ok(name, f"target {target_size}, draft {config.hidden_size}")


def _vocabulary(config: DraftConfig, target_size: int) -> CheckRow:
    name = "vocabulary"
    if config.vocab_size != target_size:
        return failed(
            name,
            f"vocab_size is {config.vocab_size}, the target's {target_size}",
            "use the target that the draft was trained for",
        )
    return ok(name, f"{target_size} tokens, of which the draft proposes {config.draft_vocab_size}")


def _tokenizer(draft: Path, loaded: LoadedTarget) -> CheckRow:
    name = "tokenizer"
    fix = "use the target that the draft was trained for, with its own tokenizer"
    size = loaded.model.config.vocab_size
    ids = loaded.tokenizer.get_vocab()
    largest = max(ids.values())
    if largest >= size:
        return failed(name, f"the target's tokenizer has id {largest}, its model {size} ids", fix)
    try:
        own = read_vocabulary(draft)
    except CheckpointError as error:
        return warning(name, str(error), "remove or repair it")
    if own is None:
        return ok(name, f"{len(ids)} tokens of the target; the draft brings none of its own")
    differing = differing_tokens(own, ids)
    if differing:
        return failed(
            name,
            f"{len(differing)} of {len(own)} tokens in {draft / TOKENIZER_FILE} have other ids in "
            f"the target, e.g. {differing[0]!r}",
            fix,
        )
    return ok(name, f"{len(ids)} tokens of the target; all of the draft's agree")


def _positions(config: DraftConfig, target_positions: int) -> CheckRow:
    name = "positions"
    found = f"draft {config.max_position_embeddings}, target {target_positions}"
    if config.max_position_embeddings < target_positions:
        return warning(
            name,
            found,
            f"expect accept length to fall beyond {config.max_position_embeddings} tokens: record "
            f"traces of long prompts, or train the draft on longer text",
        )
    return ok(name, found)


def _rotary(config: DraftConfig, target: Mapping[str, Any]) -> CheckRow:
    name = "rotary embedding"
    own, others = _comparable(config.rope_parameters), _comparable(target)
    if own != others:
        return warning(
            name,
            f"draft {_spelled(own)}; target {_spelled(others)}",
            "fine if the draft was trained with it; otherwise correct rope_parameters in the "
            "draft's config.json",
        )
    return ok(name, f"{_spelled(own)}, as the target's")


def _comparable(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sorted(rope.items()) if value is not None}


def _spelled(rope: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in rope.items())
