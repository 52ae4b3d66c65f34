"""Cases of the tree operators."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_eagle_kernels.bench.case import Case, Prepared
from sgl_eagle_kernels.bench.head_cases import random_normal
from sgl_eagle_kernels.tree_grow import IsotonicCurve, grow_level
from sgl_eagle_kernels.tree_grow import reference as grow_reference
from sgl_eagle_kernels.tree_select import reference as select_reference
from sgl_eagle_kernels.tree_select import select_trees

PROB_TOLERANCE = 1e-5


def grow_case(batch_size: int, *, topk: int) -> Case:
    """One level of tree growth, every node a parent of the frontier.

    Args:
        batch_size: B.
        topk: K, and width of the frontier.

    Returns:
        The case.
    """
    num_nodes = topk * topk

    def prepare(seed: int) -> Prepared:
        path = -random_normal(seed, batch_size, topk).abs()
        prob = path.exp()
        steps = torch.log_softmax(random_normal(seed + 1, batch_size, topk, topk), dim=-1)
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
        num_launches=1,
    )


def select_case(batch_size: int, *, topk: int, num_steps: int, num_draft_tokens: int) -> Case:
    """Selection of trees from all nodes of a draft.

    Args:
        batch_size: B.
        topk: K, and width of the frontier.
        num_steps: Draft steps.
        num_draft_tokens: M.

    Returns:
        The case.
    """

    def prepare(seed: int) -> Prepared:
        prob, parents, depths = draw_trees(seed, batch_size, topk, num_steps)
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
        num_launches=2,
    )


def draw_trees(
    seed: int, batch_size: int, topk: int, num_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Random drafts that were grown level by level.

    Args:
        seed: Of the step probabilities.
        batch_size: B.
        topk: K, and width of the frontier.
        num_steps: Levels.

    Returns:
        [B, N] float32 acceptance probabilities, [B, N] int64 parents and [N] int64 depths.
    """
    root = torch.zeros(batch_size, 1, device="cuda")
    probs, parents, depths = [], [], []
    path, prob, width, start = root, root + 1, 1, 0
    frontier = torch.full((batch_size, 1), -1, device="cuda")
    curve = IsotonicCurve(knots=torch.linspace(0, 1, 33, device="cuda"), lowest_log=-12.0)
    for depth in range(1, num_steps + 1):
        steps = torch.log_softmax(3 * random_normal(seed + depth, batch_size, width, topk), dim=-1)
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
