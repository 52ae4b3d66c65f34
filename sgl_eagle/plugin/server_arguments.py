"""Resolves the server's arguments: limits of the trees, and what SGL_EAGLE must not run with."""

from __future__ import annotations

from typing import Any

from sgl_eagle.plugin.policy_source import require_within, startup_policy
from sgl_eagle.plugin.self_check import ServerConfigError, refuse_unsupported
from sgl_eagle_harness.types import TreeLimits

DEFAULT_LIMITS = TreeLimits(num_steps=6, topk=4, num_draft_tokens=16)
"""Upper limits where neither the flags nor a policy file say anything."""

DEFAULT_MAX_RUNNING_REQUESTS = 48
"""SGLang's own default for its EAGLE."""

SMALLEST_SERVER_TOPK = 2
"""With topk 1, SGLang's draft-extend returns a constant in place of the draft's confidence."""

GPU_DRAFT_BACKEND = "triton"
"""Attention of the draft, whatever the target's: one launch plans all steps, with no word to the
host, where FlashAttention-3 takes several for each and FlashInfer waits for the device."""


def resolve_server_args(server_args: Any) -> None:
    """Refuse what SGL_EAGLE cannot do and fill in what the user left open.

    Args:
        server_args: SGLang's record of arguments, or its stand-in that records assignments.
    """
    refuse_unsupported(server_args)
    given = (
        server_args.speculative_num_steps,
        server_args.speculative_eagle_topk,
        server_args.speculative_num_draft_tokens,
    )
    policy = startup_policy()
    wanted = None if policy is None else policy.limits
    limits = resolve_limits(given, wanted)
    if wanted is not None:
        require_within(wanted, limits)
    server_args.speculative_num_steps = limits.num_steps
    server_args.speculative_eagle_topk = max(limits.topk, SMALLEST_SERVER_TOPK)
    server_args.speculative_num_draft_tokens = limits.num_draft_tokens
    server_args.enable_mixed_chunk = False
    if server_args.max_running_requests is None:
        server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
    if server_args.speculative_draft_attention_backend is None and server_args.device == "cuda":
        server_args.speculative_draft_attention_backend = GPU_DRAFT_BACKEND
    if server_args.device == "cpu":
        # Its overlap scheduler records streams, which CPU tensors do not have.
        server_args.disable_overlap_schedule = True


def resolve_limits(
    given: tuple[int | None, int | None, int | None], wanted: TreeLimits | None
) -> TreeLimits:
    """Upper limits of the server.

    Args:
        given: What the three flags said: num_steps, topk, num_draft_tokens.
        wanted: Limits of the policy, which are the defaults of the flags; None has none.

    Returns:
        Limits that some tree satisfies.

    Raises:
        ServerConfigError: If the flags ask for a chain without a policy file.
        TreeLimitsError: If no tree does; names the largest legal value.
    """
    fallback = wanted or DEFAULT_LIMITS
    num_steps, topk, num_draft_tokens = given
    if wanted is None and topk is not None and topk < SMALLEST_SERVER_TOPK:
        raise ServerConfigError(
            f"--speculative-eagle-topk must be at least {SMALLEST_SERVER_TOPK}, got {topk}; serve "
            "chains with --sgl-eagle-policy and a static policy"
        )
    num_steps = fallback.num_steps if num_steps is None else num_steps
    topk = fallback.topk if topk is None else topk
    if num_draft_tokens is None:
        largest = TreeLimits(num_steps=num_steps, topk=topk, num_draft_tokens=2)
        num_draft_tokens = min(fallback.num_draft_tokens, largest.largest_num_draft_tokens)
    return TreeLimits(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)
