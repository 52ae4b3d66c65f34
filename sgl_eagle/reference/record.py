"""Dense recording: decode a text once, then draft from all of its positions in large batches.

At every position the draft depends only on the text and on the target's features up to there, so no
verification is needed: a node would be accepted if and only if its path spells the text that
follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgl_eagle.reference.draft_models import Draft
from sgl_eagle.reference.sampling import choose_token, target_probs
from sgl_eagle.reference.sampling_config import Sampling
from sgl_eagle.reference.target import Target
from sgl_eagle.reference.tree_drafter import DraftCache, TreeDrafter
from sgl_eagle_harness.dense_trace import PromptTrace
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.policies.recording import RecordingPolicy
from sgl_eagle_harness.tree_layout import build_layout
from sgl_eagle_harness.types import NO_NODE, BatchContext, CandidateTrees, Float32Array

POSITIONS_PER_BATCH = 64
"""Positions drafted together; bounds the memory of one draft step (about 1000 rows of logits)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedText:
    """One prompt and the target's answer.

    Attributes:
        prompt_id: Unique name.
        workload: Workload key.
        prompt: Token ids.
        completion: Token ids, the stop token included.
    """

    prompt_id: str
    workload: str
    prompt: tuple[int, ...]
    completion: tuple[int, ...]


def decode_texts(
    target: Target,
    prompts: Sequence[tuple[int, ...]],
    *,
    max_new_tokens: int,
    stop_tokens: frozenset[int],
    sampling: Sampling,
) -> Iterator[list[tuple[int, ...]]]:
    """Plain decoding of several prompts in lock step.

    All rows stand at the same index of their text; a row that is still inside its prompt takes the
    prompt's token instead of the target's.

    Args:
        target: Target model.
        prompts: Token ids of each prompt.
        max_new_tokens: Completion length at most.
        stop_tokens: Ids that end a completion.
        sampling: How the target chooses.

    Yields:
        After every step the completions so far; the last yield has them all.
    """
    lengths = [len(prompt) for prompt in prompts]
    shared = min(lengths)
    cache = target.make_cache(max(lengths) + max_new_tokens, batch_size=len(prompts))
    completions: list[list[int]] = [[] for _ in prompts]
    tokens = torch.tensor([prompt[:shared] for prompt in prompts], device=target.device)
    index = 0
    while True:
        output = target.forward(tokens, cache=cache, start=index)
        index += tokens.shape[1]
        logits = target.logits(output.hidden[:, -1])
        newest: list[int] = []
        for row, prompt in enumerate(prompts):
            done = completions[row]
            if index < len(prompt):
                newest.append(prompt[index])
            elif done and (done[-1] in stop_tokens or len(done) >= max_new_tokens):
                newest.append(done[-1])  # a finished row idles until the others are done
            else:
                done.append(choose_token(logits[row], sampling, len(done)))
                newest.append(done[-1])
        yield [tuple(done) for done in completions]
        if all(
            done and (done[-1] in stop_tokens or len(done) >= max_new_tokens)
            for done in completions
        ):
            return
        tokens = torch.tensor(newest, device=target.device)[:, None]


@torch.inference_mode()
def record_text(
    target: Target, draft: Draft, text: RecordedText, *, policy: RecordingPolicy, sampling: Sampling
) -> PromptTrace:
    """Draft the recording tree at every position of one text.

    Row i predicts completion token i and what follows; its root is the token before it.

    Args:
        target: Target model.
        draft: Draft model.
        text: Prompt and its completion; the prompt has at least two tokens.
        policy: What to draft.
        sampling: How the text was chosen; above temperature 0 the target scores every node.

    Returns:
        The trace of the prompt, one position for each completion token.
    """
    tokens = torch.tensor([*text.prompt, *text.completion], device=target.device)
    num_positions = len(text.completion)
    target_cache = target.make_cache(len(tokens))
    features = target.forward(tokens[None, :-1], cache=target_cache, start=0).features[0]
    cache = DraftCache(draft, capacity=len(tokens))
    roots = cache.extend(features, tokens[1:])
    # The root of row 0 is the last prompt token; its entry in the draft's cache is one before.
    first = len(text.prompt) - 2
    batches = [
        _draft_positions(cache.drafter(roots.take(rows)), policy, first, rows)
        for rows in _slices(first, first + num_positions)
    ]
    scores = None
    if sampling.temperature > 0.0:
        scores = [
            _score_nodes(target, tokens, trees, row, first + 1 + start + row, sampling)
            for start, trees in zip(
                range(0, num_positions, POSITIONS_PER_BATCH), batches, strict=True
            )
            for row in range(trees.num_rows)
        ]
    # Siblings come in groups of the widest beam, so the padded width stays a multiple of it.
    width = max(trees.num_nodes for trees in batches)
    return PromptTrace(
        prompt_id=text.prompt_id,
        workload=text.workload,
        context_len=first + 1 + np.arange(num_positions),
        next_token=np.array(text.completion, np.int32),
        tokens=_stack([np.where(t.valid, t.tokens, 0) for t in batches], width, 0, np.int32),
        parents=_stack(
            [np.where(t.valid, t.parents, NO_NODE) for t in batches], width, NO_NODE, np.int16
        ),
        depths=_stack([np.where(t.valid, t.depths, 0) for t in batches], width, 0, np.int8),
        step_log_probs=_stack([t.step_log_probs for t in batches], width, -np.inf, np.float32),
        target_log_probs=None
        if scores is None
        else _stack([score[None] for score in scores], width, -np.inf, np.float32),
    )


def _stack(
    blocks: Sequence[NDArray[Any]], width: int, fill: float, dtype: type[np.generic]
) -> NDArray[Any]:
    # Pads blocks of rows to one width and puts them after one another.
    padded = [
        np.pad(block, ((0, 0), (0, width - block.shape[1])), constant_values=fill)
        for block in blocks
    ]
    return np.concatenate(padded).astype(dtype)


def _slices(start: int, end: int) -> Iterator[slice]:
    for first in range(start, end, POSITIONS_PER_BATCH):
        yield slice(first, min(first + POSITIONS_PER_BATCH, end))


def _draft_positions(
    drafter: TreeDrafter, policy: RecordingPolicy, first: int, rows: slice
) -> CandidateTrees:
    num_rows = rows.stop - rows.start
    batch = BatchContext(
        batch_size=1,
        context_len=first + 1 + np.arange(rows.start - first, rows.stop - first),
        num_pending=np.ones(num_rows, np.int64),
    )
    return grow_trees(drafter, policy, batch)


def _score_nodes(
    target: Target,
    tokens: Tensor,
    trees: CandidateTrees,
    row: int,
    root: int,
    sampling: Sampling,
) -> Float32Array:
    # [N] the target's log probability of every node given its parent: one pass over the tree.
    nodes = np.flatnonzero(trees.valid[row])
    renumber = np.full(trees.num_nodes + 1, NO_NODE)
    renumber[nodes] = np.arange(1, len(nodes) + 1)
    renumber[NO_NODE] = 0
    parents = renumber[trees.parents[row, nodes]]
    layout = build_layout(np.concatenate([[NO_NODE], parents]), root)
    cache = target.make_cache(root + 1 + len(nodes))
    target.forward(tokens[None, :root], cache=cache, start=0)
    tree_tokens = torch.from_numpy(trees.tokens[row, nodes]).to(target.device)
    output = target.forward(
        torch.cat([tokens[root : root + 1], tree_tokens])[None],
        cache=cache,
        start=root,
        positions=torch.from_numpy(layout.positions).to(target.device),
        mask=torch.from_numpy(layout.ancestors).to(target.device),
    )
    probs = target_probs(target.logits(output.hidden[0]), sampling)
    of_nodes = probs[torch.from_numpy(parents), tree_tokens].log()
    scores = np.full(trees.num_nodes, -np.inf, np.float32)
    scores[nodes] = of_nodes.cpu().numpy()
    return scores
