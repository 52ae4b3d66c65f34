"""Start-up checks: what would fail silently, or only under load, is refused with its fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_eagle_harness.errors import SglEagleError


class ServerConfigError(SglEagleError, ValueError):
    """A server argument that SGL_EAGLE does not support."""


_Check = tuple[str, Callable[[Any], bool], str]

DRAFT_BACKENDS = ("triton", "fa3", "flashinfer", "intel_amx")
"""Attention backends that draft steps can run in."""

UNSUPPORTED: tuple[_Check, ...] = (
    (
        "speculative_draft_model_path",
        lambda value: value is None,
        "must name an EAGLE-3 draft checkpoint",
    ),
    (
        "speculative_use_rejection_sampling",
        bool,
        "must be off: trees are verified with the target-only rule",
    ),
    ("speculative_adaptive", bool, "must be off: SGL_EAGLE's own policy chooses the tree"),
    (
        "speculative_accept_threshold_single",
        lambda value: value != 1.0,
        "must be 1.0: anything else is not lossless",
    ),
    (
        "speculative_accept_threshold_acc",
        lambda value: value != 1.0,
        "must be 1.0: anything else is not lossless",
    ),
    ("speculative_token_map", bool, "must be left out: EAGLE-3 checkpoints carry their own (d2t)"),
    ("enable_multi_layer_eagle", bool, "must be off: the draft has one layer"),
    ("enable_dp_attention", bool, "must be off: ranks would have to agree on every tree"),
    ("pp_size", lambda value: value > 1, "must be 1: trees are drafted and verified on one stage"),
    (
        "disaggregation_mode",
        lambda value: value not in (None, "null"),
        "must be 'null': prefill and decode share the draft's state",
    ),
    ("enable_lora", bool, "must be off: confidences are calibrated without adapters"),
    ("lora_paths", bool, "must be empty: confidences are calibrated without adapters"),
    (
        "enable_deterministic_inference",
        bool,
        "must be off: verification draws without the request's seed",
    ),
    (
        "page_size",
        lambda value: value not in (None, 1),
        "must be 1: branches of a tree do not fill pages",
    ),
    (
        "speculative_draft_attention_backend",
        lambda value: value is not None and value not in DRAFT_BACKENDS,
        f"must be one of {', '.join(DRAFT_BACKENDS)}: which slots a branch reads with others is "
        "not known; left out, the draft decodes with triton on a GPU, whatever the target does",
    ),
)
"""Server argument, whether its value is refused, and why."""


def refuse_unsupported(server_args: Any) -> None:
    """Refuse server arguments under which SGL_EAGLE would be wrong or was never tried.

    Args:
        server_args: SGLang's record of arguments; fields that its version lacks are skipped.

    Raises:
        ServerConfigError: Names every refused flag, its value and what is allowed.
    """
    problems = []
    for field, is_refused, reason in UNSUPPORTED:
        value = getattr(server_args, field, None)
        missing_is_refused = field == "speculative_draft_model_path"
        if (value is not None or missing_is_refused) and is_refused(value):
            problems.append(f"--{field.replace('_', '-')} {reason}, got {value!r}")
    if problems:
        raise ServerConfigError("SGL_EAGLE: " + "; ".join(problems))


def require_page_size_one(page_size: int) -> None:
    """Refuse a page size that SGLang chose after the arguments were checked.

    Args:
        page_size: Tokens of one cache page.

    Raises:
        ServerConfigError: If it is not 1.
    """
    if page_size != 1:
        raise ServerConfigError(
            f"SGL_EAGLE: --page-size must be 1: branches of a tree do not fill pages, got "
            f"{page_size}, which the attention backend chose; choose another backend"
        )


def require_room_for_rounds(*, overhang: int, reserved: int) -> None:
    """Refuse a table of slots in which a round near the context limit would leave its row.

    Args:
        overhang: Slots of a row beyond the context.
        reserved: Slots that SGLang reserves behind a text before each round.

    Raises:
        ServerConfigError: If it reserves more than a row has.
    """
    if overhang < reserved:
        raise ServerConfigError(
            f"SGL_EAGLE: twice --speculative-num-steps times --speculative-eagle-topk and twice "
            f"--speculative-num-draft-tokens must be at most {overhang}, got {reserved}: so many "
            "slots has a request beyond the context in the memory pool of this model"
        )
