"""A target and its draft, loaded and joined: where every command of the engine starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch

from sgl_eagle.reference.checkpoint_digest import checkpoint_digest
from sgl_eagle.reference.draft_checkpoint import load_draft
from sgl_eagle.reference.draft_config import DraftConfig, load_draft_config
from sgl_eagle.reference.draft_models import Draft
from sgl_eagle.reference.head_checkpoint import (
    LmHead,
    StoredHead,
    describe_head,
    load_two_stage_head,
)
from sgl_eagle.reference.loading import LoadedTarget, load_target
from sgl_eagle.reference.target import Target
from sgl_eagle_harness.errors import CheckpointError
from sgl_eagle_harness.records import ModelIdentity
from sgl_eagle_kernels.packed_linear import has_int8_products, rounds_inputs

SHIPPED_DRAFT = Path(str(files("sgl_eagle") / "assets" / "draft"))
"""The head that comes with the package, trained for SmolLM2-135M-Instruct."""

DraftWeights = Literal["int8", "as-stored"]
"""Types that a draft's layer and the low-rank part of its head can be multiplied in."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A target with the draft made for it.

    Attributes:
        target: Captures the features that the draft needs.
        draft: Shares embedding and, without a head of its own, LM head with the target.
        tokenizer: The target's Hugging Face tokenizer.
        stop_tokens: Ids that end a completion.
        target_identity: For provenance.
        draft_identity: For provenance.
        dtype: Name of the type both run in.
    """

    target: Target
    draft: Draft
    tokenizer: Any
    stop_tokens: frozenset[int]
    target_identity: ModelIdentity
    draft_identity: ModelIdentity
    dtype: str

    def encode(self, user_turn: str) -> tuple[int, ...]:
        """Put one user turn into the target's chat template.

        Args:
            user_turn: What the user says.

        Returns:
            Token ids up to where the answer begins.
        """
        ids = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": user_turn}],
            add_generation_prompt=True,
            return_dict=False,
        )
        return tuple(ids)

    def decode(self, tokens: tuple[int, ...]) -> str:
        """Text of some tokens, special tokens spelled out.

        Args:
            tokens: Ids.

        Returns:
            Text.
        """
        return str(self.tokenizer.decode(list(tokens)))


def load_pair(
    target: str,
    draft: Path = SHIPPED_DRAFT,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
    lm_head: LmHead | None = None,
    draft_weights: DraftWeights | None = None,
) -> Pair:
    """Load a target and its draft and check that they fit.

    Args:
        target: `smollm2` or a directory in Hugging Face format.
        draft: Directory of an EAGLE checkpoint.
        dtype: One of `DTYPES`.
        device: Torch device.
        lm_head: Head that the draft proposes with; None takes the two-stage head where it has one.
        draft_weights: None takes int8 where it is faster, in bfloat16 on a CPU.

    Returns:
        The pair.

    Raises:
        CheckpointError: If either is missing or damaged, they do not fit each other, or int8 is
            asked for where there is none.
    """
    load_draft_config(draft)  # a bad draft is named before seconds are spent on the target
    loaded = load_target(target, dtype=DTYPES[dtype], device=device)
    return join_pair(loaded, draft, dtype=dtype, lm_head=lm_head, draft_weights=draft_weights)


def join_pair(
    loaded: LoadedTarget,
    draft: Path,
    *,
    dtype: str,
    lm_head: LmHead | None = None,
    draft_weights: DraftWeights | None = None,
) -> Pair:
    """Load the draft of a target that is loaded already.

    Args:
        loaded: The target, in `dtype`.
        draft: Directory of an EAGLE checkpoint.
        dtype: One of `DTYPES`.
        lm_head: As in `load_pair`.
        draft_weights: As in `load_pair`.

    Returns:
        The pair, on the target's device.

    Raises:
        CheckpointError: If the draft is missing or damaged, does not fit the target, or int8 is
            asked for where there is none.
    """
    _require_chat_template(loaded)
    config = load_draft_config(draft)
    num_layers = loaded.model.config.num_hidden_layers
    try:
        capture = config.hidden_state_indices(num_layers)
    except CheckpointError as error:
        raise CheckpointError(f"{draft / 'config.json'}: {error}") from error
    lean = Target(loaded.model, capture=capture)
    int8 = _takes_int8(draft_weights, lean)
    model = load_draft(
        draft,
        embed_tokens=lean.embed_tokens,
        lm_head=lean.lm_head,
        num_target_layers=num_layers,
        dtype=DTYPES[dtype],
        device=lean.embed_tokens.device,
        int8=int8,
    )
    stored = load_two_stage_head(draft, model.lm_head, lm_head, int8=int8)
    if stored is None:
        model.pack_head()
    else:
        model.two_stage_head = stored.head
    stops = loaded.model.generation_config.eos_token_id
    if stops is None:
        stops = loaded.tokenizer.eos_token_id
    return Pair(
        target=lean,
        draft=model,
        tokenizer=loaded.tokenizer,
        stop_tokens=frozenset(stops if isinstance(stops, list) else [stops]),
        target_identity=ModelIdentity(
            name=loaded.name, sha256=loaded.digest, dims=asdict(lean.dims)
        ),
        draft_identity=_identify_draft(draft, config, stored, int8=int8, target_name=loaded.name),
        dtype=dtype,
    )


def _takes_int8(choice: DraftWeights | None, target: Target) -> bool:
    possible = has_int8_products(target.dtype, target.embed_tokens.device)
    if choice == "int8" and not possible:
        raise CheckpointError(
            f"--draft-weights int8 needs --dtype bfloat16 and --device cpu, got "
            f"{str(target.dtype).removeprefix('torch.')} on {target.device}"
        )
    return possible and choice != "as-stored"


def _identify_draft(
    draft: Path, config: DraftConfig, stored: StoredHead | None, *, int8: bool, target_name: str
) -> ModelIdentity:
    # Drafts with another head or rounded weights propose other tokens at another cost: name, digest
    # and dimensions tell them apart.
    name = draft.name if draft != SHIPPED_DRAFT else f"eagle3-{target_name}"
    files = [draft / "config.json", *sorted(draft.glob("*.safetensors"))]
    dims = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "draft_vocab_size": config.draft_vocab_size,
    }
    if stored is not None:
        name = f"{name}, {describe_head(stored.head)}"
        files.append(stored.file)
        dims["lm_head_rank"] = stored.head.up.shape[1]
        dims["lm_head_candidates"] = stored.head.num_candidates
    variant = ""
    if int8:
        variant = "int8 weights"
        dims["weight_bits"] = 8
        if rounds_inputs():
            variant = "int8 weights and inputs"
            dims["input_bits"] = 8
        name = f"{name}, {variant}"
    digest = checkpoint_digest(*files, variant=variant)
    return ModelIdentity(name=name, sha256=digest, dims=dims)


def _require_chat_template(loaded: LoadedTarget) -> None:
    try:
        loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello"}], add_generation_prompt=True
        )
    except Exception as error:  # whatever a template runs into, and transformers without one
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"the tokenizer of the target {loaded.name} needs a chat template that works: {reason}"
        ) from error
