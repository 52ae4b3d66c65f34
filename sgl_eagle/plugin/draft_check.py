"""Start-up check of the draft: what SGLang would load without a word and then never accept from."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch

from sgl_eagle.reference.draft_checkpoint import load_draft, read_tensors
from sgl_eagle.reference.draft_config import load_draft_config
from sgl_eagle.reference.draft_tokenizer import TOKENIZER_FILE, differing_tokens, read_vocabulary
from sgl_eagle_harness.errors import CheckpointError

logger = logging.getLogger(__name__)

_META = torch.device("meta")
"""Shapes are checked on it: neither the target's weights nor a second draft take memory."""


def check_draft(
    path: Path, *, target: Path, vocab_size: int, hidden_size: int, num_layers: int
) -> None:
    """Refuse a draft that would be served without its weights or for another target.

    Drafts that the reference engine cannot read (another architecture, a name to be downloaded)
    are left to SGLang, with a warning that says so.

    Args:
        path: Folder of the draft.
        target: Folder of the target's tokenizer; a name that is no folder is not looked at.
        vocab_size: Rows of the target's embedding.
        hidden_size: Width of the target's hidden states.
        num_layers: Decoder layers of the target.

    Raises:
        CheckpointError: If a tensor is missing, unexpected or misshapen, `d2t` is missing or maps
            out of the vocabulary, a capture layer does not exist, or the sizes or the tokenizer
            are another target's.
    """
    try:
        config = load_draft_config(path)
    except CheckpointError as error:
        logger.warning("SGL_EAGLE did not check the draft: %s", error)
        return
    target_matrix = torch.empty((vocab_size, hidden_size), device=_META)
    load_draft(
        path,
        embed_tokens=target_matrix,
        lm_head=target_matrix,
        num_target_layers=num_layers,
        dtype=torch.float32,
        device=_META,
    )
    _require_own_head(path)
    _require_same_tokens(path, target)
    layers = [index - 1 for index in config.hidden_state_indices(num_layers)]
    logger.info(
        "SGL_EAGLE checked the draft: it reads the outputs of target layers %s and proposes %d of "
        "%d tokens",
        layers,
        config.draft_vocab_size,
        vocab_size,
    )


def _require_own_head(path: Path) -> None:
    raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
    declares_head = raw.get("draft_vocab_size") is not None and not raw.get("tie_word_embeddings")
    if declares_head and "lm_head.weight" not in read_tensors(path):
        raise CheckpointError(
            f"{path}: tensor lm_head.weight is missing, and SGLang would leave the head at its "
            f"random start; set draft_vocab_size to null in config.json to take the target's "
            f"head, got {raw['draft_vocab_size']}"
        )


def _require_same_tokens(path: Path, target: Path) -> None:
    try:
        own, ids = read_vocabulary(path), read_vocabulary(target)
    except CheckpointError as error:
        logger.warning("SGL_EAGLE did not compare the tokenizers: %s", error)
        return
    if own is None or ids is None:
        return  # nothing says whose tokens the draft was made for
    if differing := differing_tokens(own, ids):
        raise CheckpointError(
            f"{path}: {len(differing)} of {len(own)} tokens in {TOKENIZER_FILE} have other ids in "
            f"the target's, e.g. {differing[0]!r}: serve the target that the draft was made for"
        )
