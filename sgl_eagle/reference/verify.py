"""Verification: one target pass over a tree, the walk down the tokens the target chooses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sgl_eagle.reference.sampling import choose_token
from sgl_eagle.reference.sampling_config import Sampling
from sgl_eagle.reference.target import KvCache, Target
from sgl_eagle_harness.tree_layout import build_layout
from sgl_eagle_harness.types import DraftTree, VerifyOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A verified tree, its accepted nodes already compacted in the target's cache.

    Attributes:
        outcome: Accepted path and bonus token.
        features: [num_accept_tokens, F] target features of the root and the accepted nodes.
    """

    outcome: VerifyOutcome
    features: Tensor


@torch.inference_mode()
def verify_tree(
    target: Target,
    cache: KvCache,
    tree: DraftTree,
    *,
    num_cached: int,
    sampling: Sampling,
    first_index: int,
) -> Verified:
    """Run the target over a tree and accept what it would have said itself.

    The target chooses its own token at the root and at every accepted node; a draft is accepted if
    it is that token. The tree was fixed before any of these choices, so the emitted tokens have the
    target's distribution whatever the tree is (`harness/README.md`).

    Args:
        target: Target model.
        cache: One row, `num_cached` slots filled: all tokens before the root.
        tree: Root and drafted nodes.
        num_cached: Filled slots.
        sampling: How the target chooses.
        first_index: Index in the completion of the token that follows the root.

    Returns:
        Outcome and features; the cache then holds `num_cached + num_accept_tokens` slots.
    """
    device = target.device
    layout = build_layout(tree.parents, num_cached)
    output = target.forward(
        torch.from_numpy(tree.tokens)[None].to(device),
        cache=cache,
        start=num_cached,
        positions=torch.from_numpy(layout.positions).to(device),
        mask=torch.from_numpy(layout.ancestors).to(device),
    )
    outcome = walk_tree(tree, target.logits(output.hidden[0]), sampling, first_index)
    kept = torch.from_numpy(np.concatenate([[0], outcome.path])).to(device)
    if (outcome.path != np.arange(1, outcome.num_accept_tokens)).any():
        cache.compact(num_cached, kept)
    return Verified(outcome=outcome, features=output.features[0, kept])


def walk_tree(
    tree: DraftTree, logits: Tensor, sampling: Sampling, first_index: int
) -> VerifyOutcome:
    """Follow the target's choices from the root until one is not in the tree.

    Args:
        tree: Root and drafted nodes.
        logits: [M, V], row m is the target's prediction after node m.
        sampling: How the target chooses.
        first_index: Index in the completion of the token that follows the root.

    Returns:
        Accepted nodes, and the first token that is not among the children: the bonus token.
    """
    child_of = {
        (int(parent), int(token)): node
        for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
        if node
    }
    # In float32, which holds every half-precision logit and is several times faster to search.
    greedy = logits.float().argmax(dim=-1).tolist() if sampling.temperature == 0.0 else None
    node, path = 0, list[int]()
    while True:
        if greedy is not None:
            token = greedy[node]
        else:
            token = choose_token(logits[node], sampling, first_index + len(path))
        child = child_of.get((node, token))
        if child is None:
            return VerifyOutcome(path=np.array(path, np.int64), bonus_token=token)
        path.append(child)
        node = child
