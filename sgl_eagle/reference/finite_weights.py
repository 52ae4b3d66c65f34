"""Weights that are no numbers are refused where they are read: later they would blame a trace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sgl_eagle_harness.errors import CheckpointError


def not_finite(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> list[str]:
    """Name the tensors that hold NaN or infinity.

    Args:
        tensors: Of any dtype; those of integers pass.
        dtype: Type that they will run in, which may be too narrow for them.

    Returns:
        Names, in the order of the tensors.
    """
    return [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not tensor.to(dtype).isfinite().all()
    ]


def require_finite(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Refuse NaN and infinity.

    Args:
        path: Where the tensors came from, for the message.
        tensors: Of any dtype; those of integers pass.
        dtype: Type that they will run in, which may be too narrow for them.

    Raises:
        CheckpointError: Names the first tensor.
    """
    broken = not_finite(tensors, dtype)
    if broken:
        raise CheckpointError(
            f"{path}: tensor {broken[0]} holds NaN or infinity, read as "
            f"{str(dtype).removeprefix('torch.')}: the training run broke, or the type is too "
            f"narrow"
        )
