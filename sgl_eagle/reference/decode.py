"""The decode loop of the reference engine: what a serving worker must reproduce."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sgl_eagle.reference.draft_models import Draft
from sgl_eagle.reference.sampling import choose_token
from sgl_eagle.reference.sampling_config import GREEDY, Sampling
from sgl_eagle.reference.target import KvCache, Target
from sgl_eagle.reference.tree_drafter import DraftCache, TreeDrafter
from sgl_eagle.reference.verify import Verified, verify_tree
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.draft_loop import verify_tree as select_tree
from sgl_eagle_harness.errors import PromptError
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.policies.tier import SpeculationTier
from sgl_eagle_harness.types import (
    NO_NODE,
    BatchContext,
    CandidateTrees,
    Children,
    DraftTree,
    IntArray,
    VerifyOutcome,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One decode step, as measured; all times in microseconds.

    Attributes:
        position: Index in the completion of the first token that the step emits.
        speculated: False for a plain step.
        num_drafted: Nodes drafted, root excluded.
        num_draft_tokens: Tokens the target verified, root included; 1 for a plain step.
        num_accept_tokens: Tokens emitted, cut at the end of the completion.
        widths: Nodes expanded in each draft step after the first.
        extend_us: Draft-extend with the root's children.
        draft_us: Further draft steps.
        decide_us: Policy and bookkeeping of the draft loop.
        verify_us: Target pass, choice of tokens and compaction.
        total_us: The whole step.
    """

    position: int
    speculated: bool
    num_drafted: int
    num_draft_tokens: int
    num_accept_tokens: int
    widths: tuple[int, ...]
    extend_us: float
    draft_us: float
    decide_us: float
    verify_us: float
    total_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """What an observer of a step sees: the drafted nodes, the verified tree, the outcome."""

    position: int
    candidates: CandidateTrees
    tree: DraftTree
    outcome: VerifyOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One completion.

    Attributes:
        prompt: Prompt token ids.
        tokens: Completion token ids, the stop token included.
        top_two_gaps: Difference of the two best logits at each token of a plain greedy run, else
            empty; says how near a tie each choice was.
        steps: Every step after the first token, which prefill emits.
        prefill_us: Target and draft prefill and the first token.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top_two_gaps: tuple[float, ...]
    steps: tuple[StepRecord, ...]
    prefill_us: float

    @property
    def decode_us(self) -> float:
        """Time of all steps."""
        return sum(step.total_us for step in self.steps)

    @property
    def num_decode_tokens(self) -> int:
        """Tokens that steps emitted: all but the first."""
        return len(self.tokens) - 1


@dataclass(slots=True, kw_only=True)
class _Request:
    """A request in flight."""

    prompt: tuple[int, ...]
    tokens: list[int]
    cache: KvCache
    max_new_tokens: int
    stop_tokens: frozenset[int]
    sampling: Sampling
    pending_features: list[Tensor] = field(default_factory=list)
    num_pending: int = 0
    top_two_gaps: list[float] = field(default_factory=list)

    @property
    def num_cached(self) -> int:
        """Tokens before the root."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= self.max_new_tokens or self.tokens[-1] in self.stop_tokens

    def emit(self, tokens: list[int], features: Tensor) -> int:
        # Commits tokens up to the end of the completion and says how many.
        room = self.max_new_tokens - len(self.tokens)
        kept = tokens[:room]
        for index, token in enumerate(kept):
            if token in self.stop_tokens:
                kept = kept[: index + 1]
                break
        self.tokens.extend(kept)
        self.pending_features.append(features)
        self.num_pending += len(features)
        return len(kept)


class _TimedDrafter:
    """Measures how much of the draft loop is drafting."""

    def __init__(self, drafter: TreeDrafter) -> None:
        self._drafter = drafter
        self.root_us = 0.0
        self.steps_us = 0.0

    def expand_root(self, topk: int) -> Children:
        started = time.perf_counter()
        children = self._drafter.expand_root(topk)
        self.root_us += (time.perf_counter() - started) * 1e6
        return children

    def expand(self, handles: IntArray, topk: int) -> Children:
        started = time.perf_counter()
        children = self._drafter.expand(handles, topk)
        self.steps_us += (time.perf_counter() - started) * 1e6
        return children


class Engine:
    """Lossless batch-one speculative decoding with any policy."""

    def __init__(self, target: Target, draft: Draft | None) -> None:
        """Join a target and a draft.

        Args:
            target: Captures the features that the draft needs.
            draft: None only allows policies that never draft.
        """
        self.target = target
        self.draft = draft

    def generate(
        self,
        prompt: list[int],
        policy: SpecPolicy,
        *,
        max_new_tokens: int,
        stop_tokens: frozenset[int],
        sampling: Sampling = GREEDY,
        observe: Callable[[StepView], None] | None = None,
    ) -> Generation:
        """Decode one prompt.

        Args:
            prompt: Token ids, at least two.
            policy: Decides every step.
            max_new_tokens: Completion length at most.
            stop_tokens: Ids that end the completion.
            sampling: How the target chooses tokens.
            observe: Called after every speculative step; its time is not counted.

        Returns:
            The completion and its steps.

        Raises:
            PromptError: If the prompt is too short, or too long for the target.
        """
        limits = policy.limits
        largest_tree = 1 if limits is None else limits.largest_num_draft_tokens
        self._check_length(prompt, max_new_tokens)
        started = time.perf_counter()
        capacity = len(prompt) + max_new_tokens + largest_tree
        request = _Request(
            prompt=tuple(prompt),
            tokens=[],
            cache=self.target.make_cache(capacity),
            max_new_tokens=max_new_tokens,
            stop_tokens=stop_tokens,
            sampling=sampling,
        )
        draft_cache = None
        if self.draft is not None and limits is not None:
            draft_cache = DraftCache(self.draft, capacity=capacity)
        self._prefill(request, draft_cache)
        prefill_us = (time.perf_counter() - started) * 1e6
        tier, steps = SpeculationTier(), []
        while not request.finished:
            steps.append(self._step(request, draft_cache, policy, tier, observe))
        return Generation(
            prompt=request.prompt,
            tokens=tuple(request.tokens),
            top_two_gaps=tuple(request.top_two_gaps),
            steps=tuple(steps),
            prefill_us=prefill_us,
        )

    def _check_length(self, prompt: list[int], max_new_tokens: int) -> None:
        longest = self.target.dims.max_positions
        if len(prompt) < 2 or len(prompt) + max_new_tokens > longest:  # noqa: PLR2004  see message
            raise PromptError(
                f"a prompt needs at least 2 tokens, and with max_new_tokens={max_new_tokens} at "
                f"most {longest - max_new_tokens} on this target; got {len(prompt)}"
            )

    def _prefill(self, request: _Request, draft_cache: DraftCache | None) -> None:
        """Target over the prompt, first token; draft over all of the prompt but its last entry."""
        prompt = torch.tensor(request.prompt, device=self.target.device)
        output = self.target.forward(prompt[None], cache=request.cache, start=0)
        logits = self.target.logits(output.hidden[0, -1])
        self._note_gap(request, logits)
        token = choose_token(logits, request.sampling, 0)
        if draft_cache is not None:
            draft_cache.extend(output.features[0, :-1], prompt[1:])
        request.tokens.append(token)
        request.pending_features.append(output.features[0, -1:])
        request.num_pending = 1

    def _step(
        self,
        request: _Request,
        draft_cache: DraftCache | None,
        policy: SpecPolicy,
        tier: SpeculationTier,
        observe: Callable[[StepView], None] | None,
    ) -> StepRecord:
        batch = BatchContext(
            batch_size=1,
            context_len=np.array([request.num_cached]),
            num_pending=np.array([request.num_pending]),
        )
        started = time.perf_counter()
        if draft_cache is None or not tier.choose(policy, batch):
            return self._plain_step(request, started)
        return self._speculative_step(request, draft_cache, policy, batch, started, observe)

    def _plain_step(self, request: _Request, started: float) -> StepRecord:
        position = len(request.tokens)
        output = self.target.forward(
            torch.tensor([[request.tokens[-1]]], device=self.target.device),
            cache=request.cache,
            start=request.num_cached,
        )
        logits = self.target.logits(output.hidden[0, 0])
        token = choose_token(logits, request.sampling, position)
        request.emit([token], output.features[0])
        total_us = (time.perf_counter() - started) * 1e6
        self._note_gap(request, logits)
        return StepRecord(
            position=position,
            speculated=False,
            num_drafted=0,
            num_draft_tokens=1,
            num_accept_tokens=1,
            widths=(),
            extend_us=0.0,
            draft_us=0.0,
            decide_us=0.0,
            verify_us=total_us,
            total_us=total_us,
        )

    def _speculative_step(
        self,
        request: _Request,
        draft_cache: DraftCache,
        policy: SpecPolicy,
        batch: BatchContext,
        started: float,
        observe: Callable[[StepView], None] | None,
    ) -> StepRecord:
        position = len(request.tokens)
        newest = request.tokens[len(request.tokens) - request.num_pending :]
        roots = draft_cache.extend(
            torch.cat(request.pending_features),
            torch.tensor(newest, device=self.target.device),
        )
        extend_us = (time.perf_counter() - started) * 1e6
        drafter = _TimedDrafter(draft_cache.drafter(roots.take(slice(-1, None))))
        request.pending_features, request.num_pending = [], 0
        candidates = grow_trees(drafter, policy, batch)
        columns = policy.select_verify(candidates, batch)[0]
        tree = select_tree(candidates, 0, columns, request.tokens[-1])
        drafted = time.perf_counter()
        verified = verify_tree(
            self.target,
            request.cache,
            tree,
            num_cached=request.num_cached,
            sampling=request.sampling,
            first_index=position,
        )
        num_accept_tokens = request.emit(_emitted(tree, verified), verified.features)
        ended = time.perf_counter()
        if observe is not None:
            observe(
                StepView(
                    position=position,
                    candidates=candidates,
                    tree=tree,
                    outcome=verified.outcome,
                )
            )
        extend_us += drafter.root_us
        draft_us = drafter.steps_us
        return StepRecord(
            position=position,
            speculated=True,
            num_drafted=int(candidates.valid.sum()),
            num_draft_tokens=tree.num_draft_tokens,
            num_accept_tokens=num_accept_tokens,
            widths=_widths(candidates),
            extend_us=extend_us,
            draft_us=draft_us,
            decide_us=(drafted - started) * 1e6 - extend_us - draft_us,
            verify_us=(ended - drafted) * 1e6,
            total_us=(ended - started) * 1e6,
        )

    def _note_gap(self, request: _Request, logits: Tensor) -> None:
        best = logits.float().topk(2).values
        request.top_two_gaps.append(float(best[0] - best[1]))


def _emitted(tree: DraftTree, verified: Verified) -> list[int]:
    accepted = tree.tokens[verified.outcome.path].tolist()
    return [*accepted, verified.outcome.bonus_token]


def _widths(candidates: CandidateTrees) -> tuple[int, ...]:
    # Nodes that were expanded in each draft step after the first.
    widths = []
    bounds = [*candidates.level_starts, candidates.num_nodes]
    for start, end in pairwise(bounds[1:]):
        parents = candidates.parents[0, start:end][candidates.valid[0, start:end]]
        widths.append(len(np.unique(parents[parents != NO_NODE])))
    return tuple(widths)
