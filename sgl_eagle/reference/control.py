"""The control of a comparison: known text run again without a tree, in passes of other shapes.

A pass over eight tokens multiplies other matrices than a pass over one and rounds otherwise, in
half precision far enough to change what is said. Here the target reads a text that is already
known, in causal passes: no tree, no mask of our own, no cache that is compacted. What changes from
one shape to another is therefore rounding, and what no shape changes is not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sgl_eagle.reference.decode import Generation
from sgl_eagle.reference.draft_models import Draft
from sgl_eagle.reference.target import Target
from sgl_eagle.reference.tree_drafter import DraftCache
from sgl_eagle_harness.draft_loop import Drafter, grow_trees, verify_tree
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.types import BatchContext, CandidateTrees, DraftTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One causal pass along a completion.

    Attributes:
        first: Index in the completion of its first token.
        num_tokens: Tokens; those beyond the end of the text are padding, which no kept token sees.
        num_kept: Leading tokens that count; the next pass starts behind them.
    """

    first: int
    num_tokens: int
    num_kept: int


def even_passes(num_tokens: int, size: int) -> list[Pass]:
    """Cut a completion into passes of one size.

    Args:
        num_tokens: Length of the completion.
        size: Tokens of each pass.

    Returns:
        Passes over all tokens but the last, which predicts nothing that is known.
    """
    return [
        Pass(first=first, num_tokens=size, num_kept=size)
        for first in range(0, num_tokens - 1, size)
    ]


def engine_passes(run: Generation) -> list[Pass]:
    """The target passes of an engine's run, where each tree becomes as many tokens in a row.

    Args:
        run: A run of any policy.

    Returns:
        Passes that start where the engine's did and are as large.
    """
    return [
        Pass(
            first=step.position - 1,
            num_tokens=step.num_draft_tokens,
            num_kept=step.num_accept_tokens,
        )
        for step in run.steps
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """A completion of n tokens that the target has read again.

    Attributes:
        logits: [n, V] in the target's dtype; row i predicts completion token i.
        features: [prompt + n - 1, F]; row i belongs to token i of prompt and completion together.
    """

    logits: Tensor
    features: Tensor


@torch.inference_mode()
def rerun_text(
    target: Target, prompt: Sequence[int], completion: Sequence[int], passes: Sequence[Pass]
) -> Rerun:
    """Read prompt and completion; the prompt in one pass, as every run of the engine does.

    Args:
        target: Target model.
        prompt: Token ids.
        completion: Token ids.
        passes: Passes that keep every token of the completion but the last; those beyond it are
            left out.

    Returns:
        What the target made of it.
    """
    passes = [each for each in passes if each.first < len(completion) - 1]
    widest = max((each.num_tokens for each in passes), default=0)
    padded = torch.tensor([*completion, *[completion[-1]] * widest], device=target.device)
    cache = target.make_cache(len(prompt) + len(padded))
    read = target.forward(torch.tensor([prompt], device=target.device), cache=cache, start=0)
    logits, features = [target.logits(read.hidden[0, -1])[None]], [read.features[0]]
    for each in passes:
        tokens = padded[each.first : each.first + each.num_tokens]
        read = target.forward(tokens[None], cache=cache, start=len(prompt) + each.first)
        # One row is multiplied as a vector, as in the engine's plain step.
        rows = target.logits(read.hidden[0].squeeze(0)).view(each.num_tokens, -1)
        logits.append(rows[: each.num_kept])
        features.append(read.features[0, : each.num_kept])
    return Rerun(
        logits=torch.cat(logits)[: len(completion)],
        features=torch.cat(features)[: len(prompt) + len(completion) - 1],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Redraft:
    """A step drafted again.

    Attributes:
        candidates: All nodes drafted.
        num_accept_tokens: Tokens that the step emits, bonus token included, cut at the end of the
            text.
    """

    candidates: CandidateTrees
    num_accept_tokens: int


@torch.inference_mode()
def redraft_steps(
    draft: Draft,
    rerun: Rerun,
    run: Generation,
    policy: SpecPolicy,
    *,
    text: Sequence[int],
    positions: Collection[int],
    wrap: Callable[[int, Drafter], Drafter] = lambda _position, drafter: drafter,
) -> dict[int, Redraft]:
    """Draft some steps of a run again, from other features.

    Args:
        draft: Draft model.
        rerun: Target's features along `text`.
        run: The engine's run; it extends the draft's cache where this does.
        policy: What the run was decoded with.
        text: Completion that decides what is accepted; equal to the run's up to the last position.
        positions: Positions of the speculative steps to draft.
        wrap: Given position and drafter of a step, returns the drafter to use.

    Returns:
        Position to what was drafted there.
    """
    num_prompt, device = len(run.prompt), draft.embed_tokens.device
    tokens = torch.tensor([*run.prompt, *text], device=device)
    cache = DraftCache(draft, capacity=len(tokens))
    cache.extend(rerun.features[: num_prompt - 1], tokens[1:num_prompt])
    redrafts: dict[int, Redraft] = {}
    for step in run.steps:
        if not step.speculated or step.position > max(positions):
            continue
        start, root = cache.num_entries, num_prompt + step.position - 1
        roots = cache.extend(rerun.features[start:root], tokens[start + 1 : root + 1])
        if step.position not in positions:
            continue
        batch = BatchContext(
            batch_size=1,
            context_len=np.array([root]),
            num_pending=np.array([root - start]),
        )
        drafter = wrap(step.position, cache.drafter(roots.take(slice(-1, None))))
        candidates = grow_trees(drafter, policy, batch)
        columns = policy.select_verify(candidates, batch)[0]
        tree = verify_tree(candidates, 0, columns, int(tokens[root]))
        left = text[step.position :]
        redrafts[step.position] = Redraft(
            candidates=candidates,
            num_accept_tokens=min(1 + count_spelled(tree, left), len(left)),
        )
    return redrafts


def count_spelled(tree: DraftTree, text: Sequence[int]) -> int:
    """Nodes of a tree whose path spells a text.

    Args:
        tree: Root and drafted nodes.
        text: Tokens after the root.

    Returns:
        How many; they form one chain.
    """
    on_text = np.zeros(tree.num_draft_tokens, np.bool_)
    on_text[0] = True
    for node in range(1, tree.num_draft_tokens):
        at = int(tree.depths[node]) - 1
        spells = at < len(text) and tree.tokens[node] == text[at]
        on_text[node] = spells and on_text[tree.parents[node]]
    return int(on_text.sum()) - 1
