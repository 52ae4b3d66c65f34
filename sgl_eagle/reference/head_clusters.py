"""Groups of tokens whose rows of the LM head lie close together, all of one size."""

from __future__ import annotations

import torch
from torch import Tensor

_POWER_STEPS = 12


def cluster_rows(weight: Tensor, group_size: int) -> Tensor:
    """Halve the rows along their leading direction until groups are small enough.

    Args:
        weight: [V, H].
        group_size: Tokens of a group.

    Returns:
        [ceil(V / group_size), group_size] int64 token ids, every token once; the last group is
        padded with -1.
    """
    order = torch.cat(_halve(weight, torch.arange(len(weight), device=weight.device), group_size))
    padding = order.new_full((-len(order) % group_size,), -1)
    return torch.cat([order, padding]).view(-1, group_size)


def _halve(weight: Tensor, tokens: Tensor, group_size: int) -> list[Tensor]:
    if len(tokens) <= group_size:
        return [tokens]
    rows = weight[tokens].float()
    along = rows @ _leading_direction(rows - rows.mean(0))
    ordered = tokens[along.argsort(stable=True)]
    num_groups = -(-len(tokens) // group_size)
    middle = num_groups // 2 * group_size
    return [
        *_halve(weight, ordered[:middle], group_size),
        *_halve(weight, ordered[middle:], group_size),
    ]


def _leading_direction(centred: Tensor) -> Tensor:
    # The first singular vector, near enough; from the longest row, so that no seed is needed.
    direction = centred[centred.norm(dim=1).argmax()]
    for _ in range(_POWER_STEPS):
        direction = centred.T @ (centred @ direction)
        direction = direction / direction.norm().clamp(min=torch.finfo(torch.float32).tiny)
    return direction
