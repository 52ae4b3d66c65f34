"""Which policy the server runs, and whether it fits the server."""

from __future__ import annotations

import os
from dataclasses import replace

from sgl_eagle.plugin.builtin_policy import UnmeasuredPolicy
from sgl_eagle.plugin.server_flags import PluginSettings, read_settings
from sgl_eagle_harness.errors import PolicyConfigError
from sgl_eagle_harness.policies.plan import PlanPolicy
from sgl_eagle_harness.policies.policy_file import load_policy_file
from sgl_eagle_harness.policies.price import PricePolicy
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.policies.recording import RecordingPolicy
from sgl_eagle_harness.types import TreeLimits

SGLANG_ENGINE = "sglang"
"""`CostSetup.engine` of a cost table that was measured on a server."""


def startup_policy() -> SpecPolicy | None:
    """The default policy of the file that `--sgl-eagle-policy` or `SGLEAGLE_POLICY` names.

    Returns:
        The policy; None without a file.
    """
    path = read_settings(os.environ).policy
    return None if path is None else load_policy_file(path).build()


def may_draft() -> bool:
    """Whether the server's policy drafts at all.

    Returns:
        False for a policy file whose default always decodes plainly.
    """
    policy = startup_policy()
    return policy is None or policy.limits is not None


def choose_policy(limits: TreeLimits, settings: PluginSettings) -> SpecPolicy:
    """The policy to start with.

    Args:
        limits: Upper limits of the server.
        settings: What the flags said.

    Returns:
        The policy of the file; that of a dense recording; else one that stands in for the
        server's own until the server's costs are known.
    """
    if settings.records_dense:
        return RecordingPolicy(num_steps=limits.num_steps, beams=(limits.topk,))
    policy = startup_policy()
    if policy is None:
        return UnmeasuredPolicy(limits=limits)
    # All requests of a batch are drafted for and verified at once, at one size.
    return replace(policy, rows_share_rounds=True) if isinstance(policy, PricePolicy) else policy


def require_within(policy: TreeLimits, server: TreeLimits) -> None:
    """Refuse a policy that could build a larger tree than the server has room for.

    Args:
        policy: Limits of the policy.
        server: Upper limits of the server.

    Raises:
        PolicyConfigError: Names the flag, its value and what the policy needs.
    """
    for flag, needed, given in (
        ("--speculative-num-steps", policy.num_steps, server.num_steps),
        ("--speculative-eagle-topk", policy.topk, server.topk),
        ("--speculative-num-draft-tokens", policy.num_draft_tokens, server.num_draft_tokens),
    ):
        if given < needed:
            raise PolicyConfigError(
                f"{flag} must be at least {needed}, which the policy file needs, got {given}; "
                "leave the flag out to take the policy's"
            )


def require_measured(policy: SpecPolicy, *, max_running_requests: int, context_length: int) -> None:
    """Refuse a policy that would have to guess a cost while serving.

    Args:
        policy: Any policy; price policies and plans ask for costs.
        max_running_requests: Largest batch of the server.
        context_length: Longest context of the server, in tokens.

    Raises:
        PolicyConfigError: If the table was measured on another engine, or does not reach the
            server's largest batch or longest context.
    """
    if not isinstance(policy, PricePolicy | PlanPolicy):
        return
    costs = policy.costs
    if costs.setup.engine != SGLANG_ENGINE:
        raise PolicyConfigError(
            f"the policy's cost table must be measured on engine={SGLANG_ENGINE!r}, got "
            f"engine={costs.setup.engine!r}: its prices do not hold in this server"
        )
    for flag, largest, axis_name in (
        ("--max-running-requests", max_running_requests, "batch_size"),
        ("--context-length", context_length, "context_len"),
    ):
        for grid in (costs.target, costs.draft, costs.draft_extend):
            axis = getattr(grid, axis_name)
            if axis[0] > 1 or axis[-1] < largest:
                raise PolicyConfigError(
                    f"{flag} must be in [{axis[0]}, {axis[-1]}], the {axis_name} that the "
                    f"policy's cost table measured ({grid.kind}), got 1 to {largest}"
                )
