"""Data-parallel training under `torchrun`: one process a GPU, gradients averaged by NCCL.

A draft head is small and its target is frozen, so averaging one flat gradient after each backward
pass costs a few milliseconds and needs no wrapper around the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor, distributed


def join_ranks() -> str | None:
    """Join the processes that `torchrun` started.

    Returns:
        This process's device, None where `torchrun` is not in use.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=torch.device(device))
    return device


def leave_ranks() -> None:
    """Undo `join_ranks`; does nothing in a single process."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def current_rank() -> int:
    """This process's number.

    Returns:
        0 in a single process.
    """
    return distributed.get_rank() if distributed.is_initialized() else 0


def num_ranks() -> int:
    """Processes that train together.

    Returns:
        1 in a single process.
    """
    return distributed.get_world_size() if distributed.is_initialized() else 1


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace every gradient by its mean over the processes; does nothing in a single one.

    Args:
        parameters: The same ones, in the same order, in every process; all have gradients.
    """
    if num_ranks() == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    flat /= num_ranks()
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, mean in zip(gradients, torch.split(flat, sizes), strict=True):
        gradient.copy_(mean.view_as(gradient))
