"""The `config.json` of EAGLE drafts, as SafeAILab/EAGLE, SpecForge and SGLang write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sgl_eagle_harness.errors import CheckpointError
from sgl_eagle_harness.records import describe_validation_error

DraftKind = Literal["eagle1", "eagle3"]

ARCHITECTURES: Mapping[str, DraftKind] = {
    "LlamaForCausalLMEagle": "eagle1",
    "LlamaForCausalLMEagle3": "eagle3",
}
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary types whose frequencies do not depend on the length of the sequence."""

MIN_TARGET_LAYERS = 5  # the default capture layers 2, n // 2, n - 3 need as many to be in order


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Shape and variant of a one-layer EAGLE draft model.

    Attributes:
        kind: "eagle1" (EAGLE-1 and EAGLE-2: top-layer feature) or "eagle3" (fused features).
        hidden_size: H.
        intermediate_size: Inner width of the MLP.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads; divides the query heads.
        head_dim: Width of one head.
        rms_norm_eps: Epsilon of every norm.
        rope_parameters: As transformers 5 spells them: `rope_type`, `rope_theta` and what the type
            needs.
        max_position_embeddings: Longest sequence the rotary embedding was meant for.
        vocab_size: The target's vocabulary.
        draft_vocab_size: Rows of the draft's head; `vocab_size` if it drafts over all of it.
        target_hidden_size: Width of one captured feature.
        tie_word_embeddings: The head is the embedding, unless the checkpoint has a head.
        fc_bias: `fc` has a bias.
        fc_norm: One RMSNorm for each captured feature, before `fc`.
        norm_before_fc: One RMSNorm over the concatenated features, before `fc`.
        norm_output: The next draft step is fed the normed hidden state (EAGLE-3.1), not the
            residual stream.
        aux_layer_ids: Target layers whose output is captured, None for the default of
            `hidden_state_indices`.
    """

    kind: DraftKind
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    tie_word_embeddings: bool = False
    fc_bias: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    aux_layer_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"num_attention_heads must be a multiple of num_key_value_heads, got "
                f"num_attention_heads={self.num_attention_heads}, "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise CheckpointError(
                f"draft_vocab_size must be at most vocab_size, got "
                f"draft_vocab_size={self.draft_vocab_size}, vocab_size={self.vocab_size}"
            )
        rope_type = self.rope_parameters.get("rope_type", "default")
        if rope_type not in STATIC_ROPE_TYPES:
            raise CheckpointError(
                f"rope_type must be one of {', '.join(STATIC_ROPE_TYPES)}, got {rope_type=}"
            )
        if self.kind == "eagle1" and (self.fc_norm or self.norm_before_fc or self.norm_output):
            raise CheckpointError(
                "fc_norm, norm_before_fc and norm_output belong to EAGLE-3; an EAGLE-1 draft must "
                "not set them"
            )
        if self.kind == "eagle1" and self.target_hidden_size != self.hidden_size:
            raise CheckpointError(
                f"an EAGLE-1 draft predicts the target's feature, so hidden_size must equal "
                f"target_hidden_size, got hidden_size={self.hidden_size}, "
                f"target_hidden_size={self.target_hidden_size}"
            )

    @property
    def num_features(self) -> int:
        """Captured features of one token."""
        if self.kind == "eagle1":
            return 1
        return len(self.aux_layer_ids) if self.aux_layer_ids is not None else 3

    def hidden_state_indices(self, num_target_layers: int) -> tuple[int, ...]:
        """Where the captured features lie in the `hidden_states` of a Hugging Face model.

        `hidden_states[i + 1]` is the output of layer i; the last entry is taken after the final
        norm, which is what EAGLE-1 predicts.

        Args:
            num_target_layers: n, decoder layers of the target.

        Returns:
            `num_features` indices, ascending; (2, n // 2, n - 3) by default, (n,) for EAGLE-1.

        Raises:
            CheckpointError: If the target has no such layers.
        """
        if self.kind == "eagle1":
            return (num_target_layers,)
        if self.aux_layer_ids is None:
            if num_target_layers < MIN_TARGET_LAYERS:
                raise CheckpointError(
                    f"the default capture layers need a target of at least {MIN_TARGET_LAYERS} "
                    f"layers, got {num_target_layers}: give eagle_aux_hidden_state_layer_ids"
                )
            return (2, num_target_layers // 2, num_target_layers - 3)
        if not all(0 <= layer < num_target_layers - 1 for layer in self.aux_layer_ids):
            raise CheckpointError(
                f"eagle_aux_hidden_state_layer_ids must be in [0, {num_target_layers - 2}] for a "
                f"target of {num_target_layers} layers, got {list(self.aux_layer_ids)}"
            )
        return tuple(layer + 1 for layer in self.aux_layer_ids)


class _EagleFields(BaseModel):
    """Switches that checkpoints keep at the top level or under `eagle_config`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    use_aux_hidden_state: bool | None = None
    num_aux_hidden_states: int | None = None
    fc_norm: bool | None = None
    use_aux_norm: bool | None = None
    norm_before_fc: bool | None = None
    norm_output: bool | None = None


_Size = Annotated[int, Field(gt=0, le=2**24)]
"""Memory is taken before the tensors are read, so an absurd size is refused here."""


class _ConfigFile(BaseModel):
    """The keys that are read; a Hugging Face configuration has many more, which change nothing."""

    model_config = ConfigDict(extra="ignore")

    architectures: list[str] = Field(min_length=1)
    hidden_size: _Size
    intermediate_size: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    num_hidden_layers: int = 1
    hidden_act: str = "silu"
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None
    max_position_embeddings: int = Field(default=2048, gt=0)
    vocab_size: _Size
    draft_vocab_size: _Size | None = None
    target_hidden_size: _Size | None = None
    tie_word_embeddings: bool = False
    bias: bool | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    eagle_config: _EagleFields | None = None


USED_KEYS = frozenset({*_ConfigFile.model_fields, *_EagleFields.model_fields})
"""Keys of `config.json` that decide what is loaded; all others are ignored."""


def load_draft_config(path: Path) -> DraftConfig:
    """Read the configuration of a draft checkpoint.

    Args:
        path: Folder of the checkpoint.

    Returns:
        The configuration, nested and legacy spellings resolved.

    Raises:
        CheckpointError: If the file is missing, is not JSON or describes what is not supported.
    """
    file = path / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from error
    return parse_draft_config(raw, source=str(file))


def parse_draft_config(raw: Mapping[str, Any], *, source: str) -> DraftConfig:
    """Resolve a decoded `config.json`.

    Args:
        raw: The decoded object.
        source: Where it came from, for messages.

    Returns:
        The configuration.

    Raises:
        CheckpointError: If a key is missing, malformed, or asks for what is not supported.
    """
    try:
        parsed = _ConfigFile.model_validate(raw)
        top = _EagleFields.model_validate(
            {name: raw[name] for name in _EagleFields.model_fields if name in raw}
        )
        return _resolve(parsed, top)
    except ValidationError as error:
        raise CheckpointError(f"{source}: {describe_validation_error(error)}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error


def _resolve(parsed: _ConfigFile, top: _EagleFields) -> DraftConfig:
    kinds = [ARCHITECTURES[name] for name in parsed.architectures if name in ARCHITECTURES]
    if not kinds:
        raise CheckpointError(
            f"architectures must name one of {', '.join(ARCHITECTURES)}, got {parsed.architectures}"
        )
    _require_supported(parsed)
    switches = _merge_switches(top, parsed.eagle_config or _EagleFields())
    heads = parsed.num_attention_heads
    layer_ids = switches.eagle_aux_hidden_state_layer_ids
    count = switches.num_aux_hidden_states
    if count is not None and count != len(layer_ids or range(3)):
        raise CheckpointError(
            f"num_aux_hidden_states must match eagle_aux_hidden_state_layer_ids (three when "
            f"absent), got {count} and {layer_ids}"
        )
    kind = kinds[0]
    return DraftConfig(
        kind=kind,
        hidden_size=parsed.hidden_size,
        intermediate_size=parsed.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=parsed.num_key_value_heads or heads,
        head_dim=parsed.head_dim or parsed.hidden_size // heads,
        rms_norm_eps=parsed.rms_norm_eps,
        rope_parameters=_resolve_rope(parsed),
        max_position_embeddings=parsed.max_position_embeddings,
        vocab_size=parsed.vocab_size,
        draft_vocab_size=parsed.draft_vocab_size or parsed.vocab_size,
        target_hidden_size=parsed.target_hidden_size or parsed.hidden_size,
        tie_word_embeddings=parsed.tie_word_embeddings,
        # SafeAILab's EAGLE-1 trains `fc` with a bias unless the configuration says otherwise.
        fc_bias=parsed.bias if parsed.bias is not None else kind == "eagle1",
        fc_norm=bool(switches.fc_norm or switches.use_aux_norm),
        norm_before_fc=bool(switches.norm_before_fc),
        norm_output=bool(switches.norm_output),
        aux_layer_ids=tuple(layer_ids) if layer_ids else None,
    )


def _require_supported(parsed: _ConfigFile) -> None:
    if parsed.num_hidden_layers != 1:
        raise CheckpointError(f"num_hidden_layers must be 1, got {parsed.num_hidden_layers}")
    if parsed.hidden_act != "silu":
        raise CheckpointError(f"hidden_act must be silu, got {parsed.hidden_act}")
    if parsed.attention_bias or parsed.mlp_bias:
        raise CheckpointError("attention_bias and mlp_bias must be false")


def _merge_switches(top: _EagleFields, nested: _EagleFields) -> _EagleFields:
    merged = {**top.model_dump(exclude_none=True), **nested.model_dump(exclude_none=True)}
    if merged.get("use_aux_hidden_state") is False:
        raise CheckpointError("use_aux_hidden_state must be true for an EAGLE-3 draft")
    return _EagleFields.model_validate(merged)


def _resolve_rope(parsed: _ConfigFile) -> dict[str, Any]:
    rope = dict(parsed.rope_parameters or parsed.rope_scaling or {})
    # Before transformers 5 the type was spelled `type` and theta stood at the top level.
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", parsed.rope_theta if parsed.rope_theta is not None else 10000.0)
    return rope


def dump_draft_config(config: DraftConfig) -> dict[str, Any]:
    """The `config.json` of a configuration, in the layout that SGLang reads.

    Args:
        config: Any configuration.

    Returns:
        A JSON-able object from which `parse_draft_config` gives `config` back.
    """
    names = {kind: name for name, kind in ARCHITECTURES.items()}
    full_vocabulary = config.draft_vocab_size == config.vocab_size
    dumped: dict[str, Any] = {
        "architectures": [names[config.kind]],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(config.rope_parameters),
        "rope_theta": config.rope_parameters["rope_theta"],
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": None if full_vocabulary else config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bias": config.fc_bias,
    }
    if config.kind == "eagle3":
        dumped |= {
            "fc_norm": config.fc_norm,
            "norm_before_fc": config.norm_before_fc,
            "norm_output": config.norm_output,
        }
        if config.aux_layer_ids is not None:
            dumped["eagle_config"] = {
                "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
                "use_aux_hidden_state": True,
            }
    return dumped
