"""Ways to find a row's most probable tokens without reading the whole LM head.

Letters: n rows, V tokens, H hidden size, R rank, C candidates, K `topk`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sgl_eagle.reference.head_checkpoint import describe_shortlist
from sgl_eagle.reference.head_clusters import cluster_rows
from sgl_eagle.reference.head_factors import HeadFactors
from sgl_eagle_kernels.lm_head import (
    GlobalTop,
    HeadTopk,
    LocalTop,
    Shortlist,
    TwoStageHead,
    build_two_stage_head,
    expected_recall,
)
from sgl_eagle_kernels.lm_head.reference import (
    Candidates,
    choose_candidates,
    full_topk,
    low_rank_topk,
    rank_candidates,
)

GROUP_SIZE = 128
NUM_GROUPS = (6, 12, 24)
"""Groups kept; 6 of 384 is about the share that published heads of this kind keep."""

TRIMMED_SIZES = (32768, 16384)


class Found(NamedTuple):
    """What a route makes of some rows.

    Attributes:
        best: The K most probable tokens, by token id.
        candidates: [n, C] int64 tokens that it could have named; -1 is padding.
    """

    best: HeadTopk
    candidates: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One way.

    Attributes:
        name: In words.
        method: How its factors were made; None without factors.
        rank: R of its factors; None without factors.
        num_candidates: C.
        read_bytes: Weights read for one row.
        expected_recall: Share of the best K that a random partition keeps if the low-rank order
            were exact, by K; None where that does not apply.
        run: Head inputs [n, H] and K to what is found.
    """

    name: str
    method: str | None
    rank: int | None
    num_candidates: int
    read_bytes: int
    expected_recall: Callable[[int], float] | None
    run: Callable[[Tensor, int], Found]


def full_route(weight: Tensor) -> Route:
    """The full head.

    Args:
        weight: [V, H].

    Returns:
        The route.
    """

    def run(rows: Tensor, topk: int) -> Found:
        best = full_topk(rows, weight, topk)
        return Found(best, best.ids)

    return Route(
        name="full head",
        method=None,
        rank=None,
        num_candidates=weight.shape[0],
        read_bytes=_bytes(weight),
        expected_recall=None,
        run=run,
    )


def shortlist_routes(
    weight: Tensor,
    factors: HeadFactors,
    ranks: Sequence[int],
    shortlists: Sequence[Shortlist],
    *,
    method: str,
) -> list[Route]:
    """Low-rank logits used alone and with every shortlist.

    Args:
        weight: [V, H] full head.
        factors: Their leading directions are the factors of lower ranks.
        ranks: Ranks to try, at most that of the factors.
        shortlists: Shortlists to try.
        method: How the factors were made.

    Returns:
        For each rank the low-rank logits alone, then the shortlists.
    """
    routes = []
    for rank in ranks:
        up, down = (
            tensor.to(weight.device, weight.dtype)
            for tensor in (factors.up[:, :rank], factors.down[:rank])
        )
        heads = [build_two_stage_head(weight, up, down, shortlist) for shortlist in shortlists]
        routes.append(_low_rank_route(weight, up, down, method))
        routes += [
            two_stage_route(head, name=describe_shortlist(head.shortlist), method=method)
            for head in heads
        ]
    return routes


def other_routes(
    weight: Tensor, factors: HeadFactors, counts: Tensor, *, rank: int, num_candidates: int
) -> list[Route]:
    """Published alternatives to a shortlist from low-rank scores.

    Args:
        weight: [V, H] full head.
        factors: Of at least that rank.
        counts: [V] int64 occurrences of tokens in text.
        rank: R where a route has factors.
        num_candidates: C of quantised first stages.

    Returns:
        Quantised first stages, clusters of tokens, and vocabularies trimmed by frequency.
    """
    routes = _quantised_routes(weight, factors, rank, num_candidates)
    groups = cluster_rows(weight, GROUP_SIZE)
    routes += [
        _cluster_route(weight, groups, min(number, len(groups)))
        for number in NUM_GROUPS
        if number <= len(groups)
    ]
    order = torch.argsort(counts, descending=True, stable=True)
    routes += [
        _trimmed_route(weight, order[:size].sort().values.to(weight.device))
        for size in TRIMMED_SIZES
        if size < weight.shape[0]
    ]
    return routes


def two_stage_route(
    head: TwoStageHead, *, name: str, method: str | None, first_stage_bytes: int | None = None
) -> Route:
    """Any first stage that scores all tokens, followed by exact logits of its candidates.

    Args:
        head: Weights.
        name: In words.
        method: How its factors were made, None if the first stage is not of low rank.
        first_stage_bytes: Weights that the first stage reads; None counts its factors.

    Returns:
        The route.
    """

    def run(rows: Tensor, topk: int) -> Found:
        chosen = choose_candidates(rows, head)
        return Found(rank_candidates(rows, head, chosen, min(topk, head.most_topk)), chosen.ids)

    if first_stage_bytes is None:
        first_stage_bytes = _bytes(head.up, head.down)
    rows_bytes = head.num_candidates * head.weight.shape[1] * head.weight.element_size()
    return Route(
        name=name,
        method=method,
        rank=None if method is None else head.up.shape[1],
        num_candidates=head.num_candidates,
        read_bytes=first_stage_bytes + rows_bytes,
        expected_recall=_expected_recall(head),
        run=run,
    )


def _expected_recall(head: TwoStageHead) -> Callable[[int], float] | None:
    shortlist = head.shortlist
    if not isinstance(shortlist, LocalTop) or shortlist.shuffle_seed is None:
        return None
    if head.num_tokens % shortlist.tile_size:
        return None
    num_tiles, per_tile = head.num_tokens // shortlist.tile_size, shortlist.per_tile
    return lambda topk: expected_recall(head.num_tokens, topk, num_tiles, per_tile)


def _low_rank_route(weight: Tensor, up: Tensor, down: Tensor, method: str) -> Route:
    head = build_two_stage_head(weight, up, down, GlobalTop(num_candidates=1))

    def run(rows: Tensor, topk: int) -> Found:
        best = low_rank_topk(rows, head, topk)
        return Found(best, best.ids)

    return Route(
        name="low rank alone",
        method=method,
        rank=up.shape[1],
        num_candidates=weight.shape[0],
        read_bytes=_bytes(up, down),
        expected_recall=None,
        run=run,
    )


def _quantised_routes(
    weight: Tensor, factors: HeadFactors, rank: int, num_candidates: int
) -> list[Route]:
    shortlist = GlobalTop(num_candidates=num_candidates)
    width = weight.shape[1]
    identity = torch.eye(width, dtype=weight.dtype, device=weight.device)
    up, down = (
        tensor.to(weight.device, weight.dtype)
        for tensor in (factors.up[:, :rank], factors.down[:rank])
    )
    scales = 4 * weight.shape[0]
    return [
        two_stage_route(
            build_two_stage_head(weight, round_to_int8(weight), identity, shortlist),
            name=f"int8 full head, {describe_shortlist(shortlist)}",
            method=None,
            first_stage_bytes=weight.numel() + scales,
        ),
        two_stage_route(
            build_two_stage_head(weight, round_to_int8(up), down, shortlist),
            name=f"int8 factor, {describe_shortlist(shortlist)}",
            method="int8",
            first_stage_bytes=up.numel() + scales + _bytes(down),
        ),
    ]


def round_to_int8(weight: Tensor) -> Tensor:
    """What is left of a matrix after eight bits and one scale a row.

    Args:
        weight: [V, R].

    Returns:
        [V, R] in its dtype.
    """
    scale = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    return ((weight.float() / scale).round() * scale).to(weight.dtype)


def _cluster_route(weight: Tensor, groups: Tensor, kept: int) -> Route:
    # A group is scored by the mean of its rows; dropped groups count as if all their rows were it.
    held = groups >= 0
    sizes = held.sum(1)
    rows_of = weight[groups.clamp(min=0)].float() * held[:, :, None]
    centroids = (rows_of.sum(1) / sizes[:, None]).to(weight.dtype)
    head = build_two_stage_head(
        weight, weight[:, :1], weight[:1], GlobalTop(num_candidates=1)
    )  # only its full head is used

    def run(rows: Tensor, topk: int) -> Found:
        scores = functional.linear(rows, centroids).float()
        chosen = scores.topk(kept, dim=-1).indices
        rest = (scores + sizes.log()).scatter(1, chosen, -torch.inf).logsumexp(-1)
        ids = groups[chosen].flatten(1)
        return Found(rank_candidates(rows, head, Candidates(ids, rest), topk), ids)

    count = kept * groups.shape[1]
    return Route(
        name=f"{kept} of {len(groups)} clusters of {groups.shape[1]}",
        method=None,
        rank=None,
        num_candidates=count,
        read_bytes=_bytes(centroids) + count * weight.shape[1] * weight.element_size(),
        expected_recall=None,
        run=run,
    )


def _trimmed_route(weight: Tensor, kept: Tensor) -> Route:
    part = weight[kept]

    def run(rows: Tensor, topk: int) -> Found:
        best = full_topk(rows, part, topk)
        best = best._replace(ids=kept[best.ids])
        return Found(best, kept.expand(len(rows), -1))

    return Route(
        name=f"{len(kept)} most frequent tokens",
        method=None,
        rank=None,
        num_candidates=len(kept),
        read_bytes=_bytes(part),
        expected_recall=None,
        run=run,
    )


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
