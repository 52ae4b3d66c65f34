"""The cases: every route of the LM head at the shapes of real models, and the tree operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sgl_eagle_kernels.bench.case import Case, Prepared
from sgl_eagle_kernels.lm_head import (
    GlobalTop,
    HeadTopk,
    LocalTop,
    Shortlist,
    TwoStageHead,
    build_two_stage_head,
    rank_tokens,
)
from sgl_eagle_kernels.lm_head import reference as head_reference
from sgl_eagle_kernels.tree_grow import IsotonicCurve, grow_level
from sgl_eagle_kernels.tree_grow import reference as grow_reference
from sgl_eagle_kernels.tree_select import reference as select_reference
from sgl_eagle_kernels.tree_select import select_trees

SHAPES = ((49152, 576), (49152, 4096), (128256, 4096), (151936, 5120), (262144, 3840))
"""(vocabulary, hidden size)."""
ROWS = (1, 2, 4, 8, 16, 64)
RANKS = (128, 256)
SHORTLISTS: tuple[Shortlist, ...] = (
    LocalTop(tile_size=256, per_tile=1),
    LocalTop(tile_size=128, per_tile=1),
    LocalTop(tile_size=256, per_tile=2),
    GlobalTop(num_candidates=512),
)
TRIMMED = (32768, 16384)
"""Vocabularies of frequency-trimmed heads, by `d2t`."""
TOPK = 8
HALF_BYTES = 2
LOG_PROB_TOLERANCE = 2e-3  # sums of bfloat16 products in float32, in another order
PROB_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which cases to run.

    Attributes:
        shapes: (vocabulary, hidden size) of heads.
        rows: Rows of heads.
        ranks: Ranks of factors.
    """

    shapes: Sequence[tuple[int, int]] = SHAPES
    rows: Sequence[int] = ROWS
    ranks: Sequence[int] = RANKS


def make_cases(selection: Selection) -> Iterator[Case]:
    """All cases of a selection.

    Args:
        selection: Which.

    Yields:
        Heads first, then the tree operators.
    """
    for num_tokens, hidden in selection.shapes:
        for num_rows in selection.rows:
            yield _full_case("full head", num_tokens, hidden, num_rows)
            for trimmed in TRIMMED:
                if trimmed < num_tokens:
                    yield _full_case(f"trimmed to {trimmed}", trimmed, hidden, num_rows)
            for rank in selection.ranks:
                for shortlist in SHORTLISTS:
                    yield _two_stage_case(num_tokens, hidden, num_rows, rank, shortlist)
    for batch_size in (1, 8, 64):
        yield _grow_case(batch_size, topk=8)
        yield _select_case(batch_size, topk=8, num_steps=8, num_draft_tokens=64)


def _normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32)


def _full_case(variant: str, num_tokens: int, hidden: int, num_rows: int) -> Case:
    def prepare(seed: int) -> Prepared:
        weight = (_normal(seed, num_tokens, hidden) / hidden**0.5).bfloat16()
        x = _normal(seed + 1, num_rows, hidden).bfloat16()

        def run() -> tuple[Tensor, Tensor]:
            logits = functional.linear(x, weight).float()
            best = torch.log_softmax(logits, dim=-1).topk(TOPK, dim=-1)
            return best.values, best.indices

        return Prepared(run=run, check=lambda: "")  # it is the baseline: torch alone

    return Case(
        op="lm_head",
        variant=variant,
        shape={"V": num_tokens, "H": hidden, "rows": num_rows},
        floor_bytes=HALF_BYTES * hidden * (num_tokens + num_rows),
        prepare=prepare,
    )


def _two_stage_case(
    num_tokens: int, hidden: int, num_rows: int, rank: int, shortlist: Shortlist
) -> Case:
    def prepare(seed: int) -> Prepared:
        # A head whose low-rank part dominates, so that shortlists are as good as real ones.
        up = (_normal(seed, num_tokens, rank) / rank**0.5).bfloat16()
        down = (_normal(seed + 1, rank, hidden) / hidden**0.5).bfloat16()
        weight = _normal(seed + 2, num_tokens, hidden) / (4 * hidden**0.5)
        weight = weight.add_(up.float() @ down.float()).bfloat16()
        head = build_two_stage_head(weight, up, down, shortlist)
        x = _normal(seed + 3, num_rows, hidden).bfloat16()
        return Prepared(
            run=lambda: rank_tokens(x, head, TOPK), check=lambda: compare_heads(x, head, TOPK)
        )

    count = shortlist.count(num_tokens)
    elements = num_tokens * rank + rank * hidden + num_rows * hidden * (1 + count)
    kind = "local" if isinstance(shortlist, LocalTop) else "global"
    detail = (
        f"{shortlist.tile_size} x {shortlist.per_tile}"
        if isinstance(shortlist, LocalTop)
        else f"{shortlist.num_candidates}"
    )
    return Case(
        op="lm_head",
        variant=f"{kind} {detail}, rank {rank}",
        shape={"V": num_tokens, "H": hidden, "rows": num_rows, "R": rank, "C": count},
        floor_bytes=HALF_BYTES * elements,
        prepare=prepare,
    )


def compare_heads(x: Tensor, head: TwoStageHead, topk: int) -> str:
    """Compare the kernels with the reference in float32.

    Args:
        x: [N, H].
        head: Weights in half precision.
        topk: K.

    Returns:
        What differs, an empty string if nothing: where two logits are closer than the tolerance,
        the order of their tokens is free.
    """
    found = rank_tokens(x, head, topk)
    # The same intermediate rounding as the kernels': only sums may differ.
    low = functional.linear(x, head.down)
    wide = TwoStageHead(
        weight=head.weight.float(),
        up=head.up.float(),
        down=torch.eye(low.shape[1], device=low.device),
        ids=head.ids,
        shortlist=head.shortlist,
    )
    candidates = head_reference.choose_candidates(low.float(), wide)
    wanted = head_reference.rank_candidates(x.float(), wide, candidates, topk)
    return describe_difference(found, wanted)


def describe_difference(found: HeadTopk, wanted: HeadTopk) -> str:
    """How two results differ.

    Args:
        found: Of the kernels.
        wanted: Of the reference.

    Returns:
        In words, an empty string if they agree.
    """
    if not torch.equal(found.is_finite, wanted.is_finite):
        return "flags differ"
    error = float((found.log_probs - wanted.log_probs).abs().max())
    if not error <= LOG_PROB_TOLERANCE:
        return f"log-probabilities differ by {error:.2e}"
    other = found.ids != wanted.ids
    gaps = (wanted.log_probs[:, :-1] - wanted.log_probs[:, 1:]).abs() <= 2 * LOG_PROB_TOLERANCE
    near = torch.zeros_like(other)
    near[:, :-1] |= gaps
    near[:, 1:] |= gaps
    near[:, -1] = True  # its competitor lies beyond the cut
    if bool((other & ~near).any()):
        return f"{int((other & ~near).sum())} ids differ away from ties"
    return ""


def _grow_case(batch_size: int, *, topk: int) -> Case:
    num_nodes = topk * topk

    def prepare(seed: int) -> Prepared:
        path = -_normal(seed, batch_size, topk).abs()
        prob = path.exp()
        steps = torch.log_softmax(_normal(seed + 1, batch_size, topk, topk), dim=-1)
        curve = IsotonicCurve(knots=torch.linspace(0, 1, 33, device="cuda"), lowest_log=-12.0)
        return Prepared(
            run=lambda: grow_level(path, prob, steps, calibration=curve, width=topk),
            check=lambda: _first_difference(
                grow_level(path, prob, steps, calibration=curve, width=topk)._asdict(),
                grow_reference.grow_level(path, prob, steps, curve, topk)._asdict(),
            ),
        )

    return Case(
        op="tree_grow",
        variant="isotonic",
        shape={"B": batch_size, "topk": topk},
        floor_bytes=4 * batch_size * (3 * num_nodes + 4 * topk),
        prepare=prepare,
    )


def _select_case(batch_size: int, *, topk: int, num_steps: int, num_draft_tokens: int) -> Case:
    def prepare(seed: int) -> Prepared:
        prob, parents, depths = _random_trees(seed, batch_size, topk, num_steps)
        sizes = torch.tensor([1, 4, 8, 16, 32, num_draft_tokens], device="cuda")
        price = sizes[None].double() * 0.02 * torch.ones(batch_size, 1, device="cuda")
        roots = torch.arange(batch_size, device="cuda") + 100
        arguments = (prob, parents, depths, roots)
        return Prepared(
            run=lambda: select_trees(
                *arguments, sizes=sizes, verify_price=price, num_draft_tokens=num_draft_tokens
            ),
            check=lambda: _first_difference(
                select_trees(
                    *arguments, sizes=sizes, verify_price=price, num_draft_tokens=num_draft_tokens
                )._asdict(),
                select_reference.select_trees(*arguments, sizes, price, num_draft_tokens)._asdict(),
            ),
        )

    num_nodes = topk + (num_steps - 1) * topk**2
    return Case(
        op="tree_select",
        variant="price",
        shape={"B": batch_size, "topk": topk, "steps": num_steps, "M": num_draft_tokens},
        floor_bytes=batch_size * (12 * num_nodes + num_draft_tokens * (64 + num_draft_tokens)),
        prepare=prepare,
    )


def _random_trees(
    seed: int, batch_size: int, topk: int, num_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    root = torch.zeros(batch_size, 1, device="cuda")
    probs, parents, depths = [], [], []
    path, prob, width, start = root, root + 1, 1, 0
    frontier = torch.full((batch_size, 1), -1, device="cuda")
    curve = IsotonicCurve(knots=torch.linspace(0, 1, 33, device="cuda"), lowest_log=-12.0)
    for depth in range(1, num_steps + 1):
        steps = torch.log_softmax(3 * _normal(seed + depth, batch_size, width, topk), dim=-1)
        level = grow_reference.grow_level(path, prob, steps, curve, topk)
        probs.append(level.prob)
        parents.append(frontier.repeat_interleave(topk, dim=1))
        depths += [depth] * (width * topk)
        frontier = level.frontier + start
        start += width * topk
        path, prob, width = level.frontier_path, level.frontier_prob, topk
    return torch.cat(probs, 1), torch.cat(parents, 1), torch.tensor(depths, device="cuda")


def _first_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    for name, tensor in wanted.items():
        same = _is_near if tensor.is_floating_point() else torch.equal
        if not same(found[name], tensor):
            return f"{name} differs"
    return ""


def _is_near(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=PROB_TOLERANCE, atol=PROB_TOLERANCE)
