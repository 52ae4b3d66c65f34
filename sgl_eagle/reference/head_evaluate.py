"""What a two-stage head loses against the full one, on text that it was not fitted to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sgl_eagle.reference.draft_models import Draft
from sgl_eagle.reference.head_checkpoint import describe_shortlist
from sgl_eagle.reference.head_factors import HeadFactors
from sgl_eagle.reference.head_states import HeadStates
from sgl_eagle_kernels.lm_head import (
    HeadTopk,
    LocalTop,
    Shortlist,
    TwoStageHead,
    build_two_stage_head,
    expected_recall,
)
from sgl_eagle_kernels.lm_head.reference import (
    choose_candidates,
    full_topk,
    low_rank_topk,
    rank_candidates,
)

ROWS = 128  # rows scored together; bounds the memory of gathered head rows


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadScore:
    """One head against the full head, over all draft steps.

    Attributes:
        rank: R of the factors; None is the full head itself.
        shortlist: In words.
        num_candidates: C.
        recall_top1: Share of rows whose full top-1 is a candidate.
        recall_topk: Share of the full top-k that are candidates.
        expected_recall_topk: What a random partition keeps if the low-rank order were exact; None
            where that does not apply.
        agreement_top1: Share of rows with the same top-1.
        log_prob_error: Mean absolute error of the log-probability of the head's own top-1, in nats.
        prob_error: The same of the probability.
        accept_length: Of chains of top-1 drafts against the text, bonus token included.
    """

    rank: int | None
    shortlist: str
    num_candidates: int
    recall_top1: float
    recall_topk: float
    expected_recall_topk: float | None
    agreement_top1: float
    log_prob_error: float
    prob_error: float
    accept_length: float


@torch.inference_mode()
def evaluate_heads(
    draft: Draft,
    states: HeadStates,
    factors: HeadFactors,
    *,
    ranks: Sequence[int],
    shortlists: Sequence[Shortlist],
    topk: int,
    on_score: Callable[[], None],
) -> list[HeadScore]:
    """Score every rank with every shortlist.

    Args:
        draft: Its full head is the judge.
        states: Held-out text.
        factors: Their leading directions are the factors of lower ranks.
        ranks: Ranks to try, at most that of the factors.
        shortlists: Shortlists to try.
        topk: K of the recall.
        on_score: Called after each head.

    Returns:
        The full head first; then, for each rank, the low-rank logits used alone and every
        shortlist.
    """
    weight = draft.lm_head
    inputs = states.inputs.to(weight.dtype).flatten(0, 1)
    full = _in_chunks(inputs, partial(full_topk, weight=weight, topk=topk))
    judge = _Judge(draft=draft, states=states, inputs=inputs, full=full)
    scores = [judge.score(full, full.ids, rank=None, shortlist="full head", expected=None)]
    on_score()
    for rank in ranks:
        up, down = (
            tensor.to(weight.device, weight.dtype)
            for tensor in (factors.up[:, :rank], factors.down[:rank])
        )
        for index, shortlist in enumerate(shortlists):
            head = build_two_stage_head(weight, up, down, shortlist)
            if index == 0:
                alone = _in_chunks(inputs, partial(low_rank_topk, head=head, topk=topk))
                scores.append(
                    judge.score(
                        alone, alone.ids, rank=rank, shortlist="low rank alone", expected=None
                    )
                )
                on_score()
            scores.append(judge.score_head(head))
            on_score()
    return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judge:
    """The full head's view of some rows.

    Attributes:
        draft: The draft.
        states: Where the rows come from, [S, N].
        inputs: [S * N, H].
        full: What the full head makes of them.
    """

    draft: Draft
    states: HeadStates
    inputs: Tensor
    full: HeadTopk

    def score_head(self, head: TwoStageHead) -> HeadScore:
        topk = self.full.ids.shape[1]
        found, candidates = [], []
        for rows in self.inputs.split(ROWS):
            chosen = choose_candidates(rows, head)
            candidates.append(chosen.ids)
            found.append(rank_candidates(rows, head, chosen, min(topk, head.most_topk)))
        joined = HeadTopk(*(torch.cat(parts) for parts in zip(*found, strict=True)))
        return self.score(
            joined,
            torch.cat(candidates),
            rank=head.up.shape[1],
            shortlist=describe_shortlist(head.shortlist),
            expected=_expected(head, topk),
        )

    def score(
        self,
        found: HeadTopk,
        candidates: Tensor,
        *,
        rank: int | None,
        shortlist: str,
        expected: float | None,
    ) -> HeadScore:
        kept = torch.cat(
            [
                (best[:, :, None] == chosen[:, None, :]).any(-1)
                for best, chosen in zip(
                    self.full.ids.split(ROWS), candidates.split(ROWS), strict=True
                )
            ]
        )
        top1 = found.ids[:, 0]
        truth = (self.inputs.float() * self.draft.lm_head[top1].float()).sum(-1)
        truth -= self.full.log_normalizer
        own = found.log_probs[:, 0]
        return HeadScore(
            rank=rank,
            shortlist=shortlist,
            num_candidates=candidates.shape[1],
            recall_top1=float(kept[:, 0].float().mean()),
            recall_topk=float(kept.float().mean()),
            expected_recall_topk=expected,
            agreement_top1=float((top1 == self.full.ids[:, 0]).float().mean()),
            log_prob_error=float((own - truth).abs().mean()),
            prob_error=float((own.exp() - truth.exp()).abs().mean()),
            accept_length=self._accept_length(top1),
        )

    def _accept_length(self, top1: Tensor) -> float:
        drafted = self.draft.to_target_ids(top1).view_as(self.states.next_tokens)
        right = (drafted == self.states.next_tokens).int().cumprod(0)
        # Chains that leave the text are counted up to its end only.
        return 1.0 + float(right.sum() / right.shape[1])


def _in_chunks(inputs: Tensor, rank_rows: Callable[[Tensor], HeadTopk]) -> HeadTopk:
    parts = [rank_rows(rows) for rows in inputs.split(ROWS)]
    return HeadTopk(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _expected(head: TwoStageHead, topk: int) -> float | None:
    shortlist = head.shortlist
    if not isinstance(shortlist, LocalTop) or shortlist.shuffle_seed is None:
        return None
    if head.num_tokens % shortlist.tile_size:
        return None
    num_tiles = head.num_tokens // shortlist.tile_size
    return expected_recall(head.num_tokens, topk, num_tiles, shortlist.per_tile)
