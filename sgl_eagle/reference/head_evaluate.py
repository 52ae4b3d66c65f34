"""What a cheaper head loses against the full one, on text that it was not fitted to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_eagle.reference.draft_models import Draft
from sgl_eagle.reference.head_routes import Route, full_route
from sgl_eagle.reference.head_states import HeadStates
from sgl_eagle_harness.reliability import expected_calibration_error

ROWS = 64  # rows scored together; bounds the memory of gathered head rows


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadScore:
    """One route against the full head, over all draft steps.

    Attributes:
        route: In words.
        method: How its factors were made; None without factors.
        rank: R of its factors; None without factors.
        num_candidates: C.
        read_mb: Megabytes of weights read for one row.
        recall_top1: Share of rows whose full top-1 is a candidate.
        recall_topk: Share of the full top-k that are candidates.
        expected_recall_topk: What a random partition keeps if the low-rank order were exact; None
            where that does not apply.
        agreement_top1: Share of rows with the same top-1.
        log_prob_error: Mean absolute error of the log-probability of the head's own top-1 against
            the full head in float32, in nats. The full head's own is that of rounded logits.
        prob_error: The same of the probability.
        path_ece: Calibration error of path confidence, over chains of top-1 drafts against the
            text: every draft whose predecessors were right, in bins of equal mass.
        accept_length: Of those chains, bonus token included.
    """

    route: str
    method: str | None
    rank: int | None
    num_candidates: int
    read_mb: float
    recall_top1: float
    recall_topk: float
    expected_recall_topk: float | None
    agreement_top1: float
    log_prob_error: float
    prob_error: float
    path_ece: float
    accept_length: float


@torch.inference_mode()
def evaluate_routes(
    draft: Draft,
    states: HeadStates,
    routes: Sequence[Route],
    *,
    topk: int,
    on_score: Callable[[], None],
) -> list[HeadScore]:
    """Score routes.

    Args:
        draft: Its full head is the judge.
        states: Held-out text.
        routes: Any.
        topk: K of the recall.
        on_score: Called after each route, the full head included.

    Returns:
        The full head first, then the routes.
    """
    weight = draft.lm_head
    inputs = states.inputs.to(weight.dtype).flatten(0, 1)
    full = full_route(weight)
    exact = weight.float()

    def view(rows: Tensor) -> tuple[Tensor, ...]:
        return full.run(rows, topk).best.ids, (rows.float() @ exact.T).logsumexp(-1)

    best, log_normalizer = _by_batch(view, inputs)
    judge = _Judge(
        draft=draft, states=states, inputs=inputs, best=best, log_normalizer=log_normalizer
    )
    scores = []
    for route in (full, *routes):
        scores.append(judge.score(route, topk))
        on_score()
    return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judge:
    """The full head's view of some rows.

    Attributes:
        draft: The draft.
        states: Where the rows come from, [S, N].
        inputs: [S * N, H].
        best: [S * N, K] the full head's best tokens.
        log_normalizer: [S * N] of the full head in float32.
    """

    draft: Draft
    states: HeadStates
    inputs: Tensor
    best: Tensor
    log_normalizer: Tensor

    def score(self, route: Route, topk: int) -> HeadScore:
        def propose(rows: Tensor, best: Tensor) -> tuple[Tensor, ...]:
            found = route.run(rows, topk)
            first = found.best.ids[:, 0], found.best.log_probs[:, 0]
            return *first, _is_among(best, found.candidates).float()

        top1, own, among = _by_batch(propose, self.inputs, self.best)
        truth = (self.inputs.float() * self.draft.lm_head[top1].float()).sum(-1)
        truth -= self.log_normalizer
        right = self._right(top1)
        expected = route.expected_recall
        return HeadScore(
            route=route.name,
            method=route.method,
            rank=route.rank,
            num_candidates=route.num_candidates,
            read_mb=route.read_bytes / 1e6,
            recall_top1=float(among[:, 0].mean()),
            recall_topk=float(among.mean()),
            expected_recall_topk=None if expected is None else expected(topk),
            agreement_top1=float((top1 == self.best[:, 0]).float().mean()),
            log_prob_error=float((own - truth).abs().mean()),
            prob_error=float((own.exp() - truth.exp()).abs().mean()),
            path_ece=self._path_ece(own, right),
            # Chains that leave the text are counted up to its end only.
            accept_length=1.0 + float(right.sum() / right.shape[1]),
        )

    def _right(self, top1: Tensor) -> Tensor:
        # [S, N] bool: all drafts of the chain up to this one are what the text says.
        drafted = self.draft.to_target_ids(top1).view_as(self.states.next_tokens)
        return (drafted == self.states.next_tokens).int().cumprod(0).bool()

    def _path_ece(self, own: Tensor, right: Tensor) -> float:
        reached = torch.ones_like(right)
        reached[1:] = right[:-1]
        reached &= self.states.next_tokens >= 0
        confidence = own.view_as(right).double().cumsum(0).exp()
        return expected_calibration_error(
            confidence[reached].cpu().numpy(), right[reached].double().cpu().numpy()
        )


def _by_batch(run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
    # Results go where they belong at once: kept apart until the end, they would lie between the
    # scores of whole vocabularies, whose memory could then not be used again.
    joined: tuple[Tensor, ...] = ()
    start, num_rows = 0, len(inputs[0])
    for batch in zip(*(tensor.split(ROWS) for tensor in inputs), strict=True):
        parts = run(*batch)
        joined = joined or tuple(part.new_empty((num_rows, *part.shape[1:])) for part in parts)
        end = start + len(parts[0])
        for whole, part in zip(joined, parts, strict=True):
            whole[start:end] = part
        start = end
    return joined


def _is_among(best: Tensor, candidates: Tensor) -> Tensor:
    # [n, K] bool. Sorted candidates are searched: all pairs would fill the memory for large C.
    ordered = candidates.sort(dim=-1).values.contiguous()
    place = torch.searchsorted(ordered, best.contiguous()).clamp(max=ordered.shape[1] - 1)
    return ordered.gather(1, place) == best
