"""Short names of policies that need no file: "plain", "chain-4", "eagle1", "eagle2-5-4-8"."""

from __future__ import annotations

import re

from sgl_eagle_harness.errors import PolicyConfigError
from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.plain import PlainSpec
from sgl_eagle_harness.policies.registry import PolicySpec
from sgl_eagle_harness.policies.static import EAGLE1_PATHS, StaticSpec, chain_paths
from sgl_eagle_harness.types import MAX_STEPS

NAME_FORMS = "plain, eagle1, chain-STEPS or eagle2-STEPS-TOPK-TOKENS"


def named_policy(name: str) -> PolicySpec | None:
    """The policy of a short name.

    Args:
        name: One of `NAME_FORMS`.

    Returns:
        Its spec; None if the name has none of these forms.

    Raises:
        PolicyConfigError: If a chain is longer than any draft.
    """
    if name == "plain":
        return PlainSpec()
    if name == "eagle1":
        return StaticSpec(name=name, paths=EAGLE1_PATHS)
    if chain := re.fullmatch(r"chain-([1-9]\d*)", name):
        num_steps = int(chain[1])
        if num_steps > MAX_STEPS:
            raise PolicyConfigError(f"num_steps must be in [1, {MAX_STEPS}], got {num_steps=}")
        return StaticSpec(name=name, paths=chain_paths(num_steps))
    if tree := re.fullmatch(r"eagle2-(\d+)-(\d+)-(\d+)", name):
        num_steps, topk, num_draft_tokens = map(int, tree.groups())
        return Eagle2Spec(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)
    return None
