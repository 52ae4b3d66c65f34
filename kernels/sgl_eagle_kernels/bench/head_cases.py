"""Cases of the LM head: every published route to the best tokens of a row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sgl_eagle_kernels.bench.case import CACHE_FACTOR, Case, Prepared, last_cache_bytes
from sgl_eagle_kernels.lm_head import (
    GlobalTop,
    HeadTopk,
    Shortlist,
    TwoStageHead,
    build_two_stage_head,
    rank_full,
    rank_tokens,
)
from sgl_eagle_kernels.lm_head import reference as head_reference

TOPK = 8
HALF_BYTES = 2
SCALE_BYTES = 4
MOST_STREAMED, LARGEST_STREAMED = 2, 1024  # tokens kept of a tile, and in it
CANDIDATES = 512
"""C of the two-stage routes, as nearly as tiles of powers of two allow."""
CLUSTER_SIZE, NUM_CLUSTERS = 128, 8
LOG_PROB_TOLERANCE = 2e-3  # sums of bfloat16 products in float32, in another order
EDGE_NATS = 4.0
"""Sums in another order may put another token at the edge of a shortlist of C. That moves mean and
variance of what scores miss, of which normalisers take account, by a few nats over C."""
FULL = "full head"
"""The baseline that all are compared with."""
OUR_FULL = "full head, our ranking"


def choose_tile_size(num_tokens: int) -> int:
    """Tile for which one candidate a tile makes about `CANDIDATES`.

    Args:
        num_tokens: V.

    Returns:
        The nearest power of two, at least 16.
    """
    return int(max(16, 2 ** round(math.log2(num_tokens / CANDIDATES))))


def random_normal(seed: int, *shape: int) -> Tensor:
    """Fresh numbers on the GPU.

    Args:
        seed: Of the generator.
        *shape: Of the tensor.

    Returns:
        Float32.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32)


@lru_cache(maxsize=8)
def _draw_weight(num_tokens: int, hidden: int, index: int) -> Tensor:
    return (random_normal(index, num_tokens, hidden) / math.sqrt(hidden)).bfloat16()


def _weight_of(seed: int, num_tokens: int, hidden: int) -> Tensor:
    # As many matrices as the cache cannot hold together; large ones are shared by all seeds.
    num_matrices = 1 + CACHE_FACTOR * last_cache_bytes() // (HALF_BYTES * num_tokens * hidden)
    return _draw_weight(num_tokens, hidden, seed % num_matrices)


def _count_distinct_rows(num_tokens: int, num_candidates: int, num_rows: int) -> int:
    # Expected rows of the full head that independent shortlists read together.
    missed = (1 - num_candidates / num_tokens) ** num_rows
    return round(num_tokens * (1 - missed))


def full_case(num_tokens: int, hidden: int, num_rows: int, kept: int | None = None) -> Case:
    """The full head by torch alone: the baseline; or one that is trimmed to the frequent tokens.

    Args:
        num_tokens: V.
        hidden: H.
        num_rows: N.
        kept: Tokens of the trimmed head, whose ids are mapped back; None for the full head.

    Returns:
        The case.
    """

    def prepare(seed: int) -> Prepared:
        weight = _weight_of(seed, kept or num_tokens, hidden)
        x = random_normal(seed + 1, num_rows, hidden).bfloat16()
        draft_to_target = None
        if kept is not None:
            draft_to_target = torch.arange(kept, device="cuda") * (num_tokens // kept)

        def run() -> tuple[Tensor, Tensor]:
            best = _rank_by_torch(functional.linear(x, weight))
            ids = best.ids if draft_to_target is None else draft_to_target[best.ids]
            return best.log_probs, ids

        return Prepared(run=run, check=lambda: "")  # nothing to compare it with

    shape = {"V": num_tokens, "H": hidden, "rows": num_rows}
    return Case(
        op="lm_head",
        variant=FULL if kept is None else f"trimmed to {kept}",
        shape=shape if kept is None else shape | {"kept": kept},
        floor_bytes=HALF_BYTES * hidden * ((kept or num_tokens) + num_rows),
        prepare=prepare,
    )


class _TorchTop(NamedTuple):
    log_probs: Tensor
    ids: Tensor


def _rank_by_torch(logits: Tensor) -> _TorchTop:
    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    return _TorchTop(*log_probs.topk(TOPK, dim=-1))


def our_full_case(num_tokens: int, hidden: int, num_rows: int) -> Case:
    """The full head by the kernels' rules of ties and of rows that are not finite.

    Args:
        num_tokens: V.
        hidden: H.
        num_rows: N.

    Returns:
        The case.
    """

    def prepare(seed: int) -> Prepared:
        weight = _weight_of(seed, num_tokens, hidden)
        x = random_normal(seed + 1, num_rows, hidden).bfloat16()
        return Prepared(
            run=lambda: rank_full(x, weight, TOPK),
            check=lambda: describe_difference(
                rank_full(x, weight, TOPK), head_reference.full_topk(x, weight, TOPK)
            ),
        )

    return Case(
        op="lm_head",
        variant=OUR_FULL,
        shape={"V": num_tokens, "H": hidden, "rows": num_rows},
        floor_bytes=HALF_BYTES * hidden * (num_tokens + num_rows),
        prepare=prepare,
    )


def low_rank_case(num_tokens: int, hidden: int, num_rows: int, rank: int) -> Case:
    """Low-rank logits used directly, by torch.

    Args:
        num_tokens: V.
        hidden: H.
        num_rows: N.
        rank: R.

    Returns:
        The case.
    """

    def prepare(seed: int) -> Prepared:
        up, down = _draw_factors(seed, num_tokens, hidden, rank)
        x = random_normal(seed + 2, num_rows, hidden).bfloat16()
        return Prepared(
            run=lambda: _rank_by_torch(functional.linear(functional.linear(x, down), up)),
            check=lambda: "",
        )

    return Case(
        op="lm_head",
        variant=f"low-rank logits alone, rank {rank}",
        shape={"V": num_tokens, "H": hidden, "rows": num_rows, "R": rank},
        floor_bytes=HALF_BYTES * (num_tokens * rank + rank * hidden + num_rows * hidden),
        prepare=prepare,
    )


@lru_cache(maxsize=16)
def _draw_factors(seed: int, num_tokens: int, hidden: int, rank: int) -> tuple[Tensor, Tensor]:
    up = (random_normal(seed, num_tokens, rank) / math.sqrt(rank)).bfloat16()
    return up, (random_normal(seed + 1, rank, hidden) / math.sqrt(hidden)).bfloat16()


@lru_cache(maxsize=64)
def draw_head(
    seed: int, num_tokens: int, hidden: int, rank: int, shortlist: Shortlist, *, quantize: bool
) -> TwoStageHead:
    """A head of fresh numbers; large full heads are shared by all seeds.

    Args:
        seed: Of the generator.
        num_tokens: V.
        hidden: H.
        rank: R.
        shortlist: How candidates are chosen.
        quantize: Stage 1 in int8.

    Returns:
        The head in bfloat16.
    """
    weight = _weight_of(seed, num_tokens, hidden)
    up, down = _draw_factors(seed, num_tokens, hidden, rank)
    return build_two_stage_head(weight, up, down, shortlist, quantize=quantize)


def two_stage_case(
    num_tokens: int,
    hidden: int,
    num_rows: int,
    rank: int,
    shortlist: Shortlist,
    *,
    quantize: bool = False,
) -> Case:
    """The two-stage head.

    Args:
        num_tokens: V.
        hidden: H.
        num_rows: N.
        rank: R.
        shortlist: How candidates are chosen.
        quantize: Stage 1 in int8.

    Returns:
        The case.
    """

    def prepare(seed: int) -> Prepared:
        head = draw_head(seed, num_tokens, hidden, rank, shortlist, quantize=quantize)
        x = random_normal(seed + 2, num_rows, hidden).bfloat16()
        return Prepared(
            run=lambda: rank_tokens(x, head, TOPK), check=lambda: compare_heads(x, head, TOPK)
        )

    count = shortlist.count(num_tokens)
    gathered = _count_distinct_rows(num_tokens, count, num_rows)
    up_bytes = num_tokens * (rank + SCALE_BYTES if quantize else HALF_BYTES * rank)
    return Case(
        op="lm_head",
        variant=f"{_describe(shortlist)}{', int8' if quantize else ''}, rank {rank}",
        shape={"V": num_tokens, "H": hidden, "rows": num_rows, "R": rank, "C": count},
        floor_bytes=up_bytes + HALF_BYTES * hidden * (rank + num_rows + gathered),
        prepare=prepare,
        num_launches=_count_launches(shortlist, num_rows, quantize=quantize),
    )


def _count_launches(shortlist: Shortlist, num_rows: int, *, quantize: bool) -> int:
    # As a test counts them on a GPU that copies tensors.
    if isinstance(shortlist, GlobalTop):
        return 5
    fits = shortlist.per_tile <= MOST_STREAMED and shortlist.tile_size <= LARGEST_STREAMED
    return 3 if num_rows == 1 and fits and not quantize else 4


def _describe(shortlist: Shortlist) -> str:
    if isinstance(shortlist, GlobalTop):
        return f"global {shortlist.num_candidates}"
    shuffle = "" if shortlist.shuffle_seed is not None else ", no shuffle"
    return f"local {shortlist.tile_size} x {shortlist.per_tile}{shuffle}"


def cluster_case(num_tokens: int, hidden: int, num_rows: int) -> Case:
    """Clusters of neighbouring tokens: the best few by their centres, then exact logits of all.

    Args:
        num_tokens: V.
        hidden: H.
        num_rows: N.

    Returns:
        The case.
    """
    num_clusters = -(-num_tokens // CLUSTER_SIZE)

    def prepare(seed: int) -> Prepared:
        weight = _weight_of(seed, num_tokens, hidden)
        centres = (random_normal(seed, num_clusters, hidden) / math.sqrt(hidden)).bfloat16()
        x = random_normal(seed + 1, num_rows, hidden).bfloat16()
        places = torch.arange(CLUSTER_SIZE, device="cuda")

        def choose() -> tuple[Tensor, Tensor]:
            scores = functional.linear(x, centres).float()
            best = scores.topk(NUM_CLUSTERS, dim=-1).indices
            ids = (best[:, :, None] * CLUSTER_SIZE + places).flatten(1)
            # The mass of what is dropped is that of its centres.
            rest = scores.scatter(1, best, -torch.inf) + math.log(CLUSTER_SIZE)
            return ids.masked_fill(ids >= num_tokens, -1), rest

        def run() -> HeadTopk:
            from sgl_eagle_kernels.lm_head._triton import rank_listed

            ids, rest = choose()
            return rank_listed(x, weight, ids, None, rest, TOPK)

        def check() -> str:
            ids, rest = choose()
            head = TwoStageHead(
                weight=weight.float(),
                up=centres,
                down=centres,
                ids=None,
                shortlist=GlobalTop(num_candidates=1),
            )
            chosen = head_reference.Candidates(ids, rest.logsumexp(-1))
            wanted = head_reference.rank_candidates(x.float(), head, chosen, TOPK)
            return describe_difference(run(), wanted)

        return Prepared(run=run, check=check)

    gathered = _count_distinct_rows(num_tokens, NUM_CLUSTERS * CLUSTER_SIZE, num_rows)
    return Case(
        op="lm_head",
        variant=f"clusters {NUM_CLUSTERS} x {CLUSTER_SIZE}",
        shape={"V": num_tokens, "H": hidden, "rows": num_rows},
        floor_bytes=HALF_BYTES * hidden * (num_clusters + num_rows + gathered),
        prepare=prepare,
    )


def read_case(num_tokens: int, hidden: int, rank: int) -> Case:
    """The low-rank matrix read by a kernel that does nothing else: what stage 1 can hope for.

    Args:
        num_tokens: V.
        hidden: H.
        rank: R.

    Returns:
        The case.
    """

    def prepare(seed: int) -> Prepared:
        from sgl_eagle_kernels.bench._triton import BLOCK, read_all

        up, _ = _draw_factors(seed, num_tokens, hidden, rank)
        words = up.view(torch.int32).flatten()
        words = words[: len(words) // BLOCK * BLOCK]
        largest = torch.empty(len(words) // BLOCK, dtype=torch.int32, device="cuda")

        def check() -> str:
            read_all(words, largest)
            wanted = words.view(-1, BLOCK).amax(dim=1)
            return "" if torch.equal(largest, wanted) else "maxima differ"

        return Prepared(run=lambda: read_all(words, largest), check=check)

    return Case(
        op="lm_head",
        variant=f"low-rank matrix only read, rank {rank}",
        shape={"V": num_tokens, "H": hidden, "rows": 0, "R": rank},
        floor_bytes=HALF_BYTES * num_tokens * rank,
        prepare=prepare,
        num_launches=1,
    )


def compare_heads(
    x: Tensor,
    head: TwoStageHead,
    topk: int,
    call: Callable[[Tensor, TwoStageHead, int], HeadTopk] = rank_tokens,
) -> str:
    """Compare the kernels with the reference in float32.

    Args:
        x: [N, H].
        head: Weights in half precision.
        topk: K.
        call: Runs the kernels.

    Returns:
        What differs, an empty string if nothing: where two logits are closer than the tolerance,
        the order of their tokens is free.
    """
    # Imported late: only CUDA machines need Triton.
    from sgl_eagle_kernels.lm_head._triton.projection import project

    found = call(x, head, topk)
    # The same intermediate rounding as the kernels: only sums may differ.
    low = project(x, head)
    wide = replace(
        head,
        weight=head.weight.float(),
        up=head.up.float() if head.up_scale is None else head.up,
        down=torch.eye(low.shape[1], device=low.device),
    )
    candidates = head_reference.choose_candidates(low.float(), wide)
    wanted = head_reference.rank_candidates(x.float(), wide, candidates, topk)
    tolerance = LOG_PROB_TOLERANCE + EDGE_NATS / head.num_candidates
    return describe_difference(found, wanted, normalizer_tolerance=tolerance)


def describe_difference(
    found: HeadTopk, wanted: HeadTopk, *, normalizer_tolerance: float = LOG_PROB_TOLERANCE
) -> str:
    """How two results differ.

    Args:
        found: Of the kernels.
        wanted: Of the reference.
        normalizer_tolerance: Nats by which normalisers may differ.

    Returns:
        In words, an empty string if they agree.
    """
    if not torch.equal(found.is_finite, wanted.is_finite):
        return "flags differ"
    shift = float((found.log_normalizer - wanted.log_normalizer).abs().max())
    if not shift <= normalizer_tolerance:
        return f"normalizers differ by {shift:.2e}"
    logits = (one.log_probs + one.log_normalizer[:, None] for one in (found, wanted))
    error = float(torch.sub(*logits).abs().max())
    if not error <= LOG_PROB_TOLERANCE:
        return f"logits differ by {error:.2e}"
    other = found.ids != wanted.ids
    gaps = (wanted.log_probs[:, :-1] - wanted.log_probs[:, 1:]).abs() <= 2 * LOG_PROB_TOLERANCE
    near = torch.zeros_like(other)
    near[:, :-1] |= gaps
    near[:, 1:] |= gaps
    near[:, -1] = True  # its competitor lies beyond the cut
    if bool((other & ~near).any()):
        return f"{int((other & ~near).sum())} ids differ away from ties"
    return ""
