"""A draft's tensors: broken numbers, quantised storage, and weights that nobody trained."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sgl_eagle.reference.check_row import CheckRow, failed, ok, warning
from sgl_eagle.reference.finite_weights import not_finite

STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NORMAL_STD = 0.02
"""Standard deviation that Hugging Face models are initialised with."""

STD_TOLERANCE = 0.02
KURTOSIS_TOLERANCE = 0.15
NORMAL_KURTOSIS = 3.0
NAMED_TENSORS = 4
MAPPING = "d2t"


def check_storage(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> CheckRow:
    """Look at how the weights are stored.

    Args:
        tensors: As `read_tensors` gives them.
        dtype: Type that they will run in.

    Returns:
        Failed where a weight is stored in a type that needs scales to be read.
    """
    name = "dtype"
    weights = {key: tensor for key, tensor in tensors.items() if key != MAPPING}
    foreign = {key: t.dtype for key, t in weights.items() if t.dtype not in STORED_DTYPES}
    if foreign:
        return failed(
            name,
            f"{_some(foreign)} stored as {_dtype_name(next(iter(foreign.values())))}",
            "use the draft's unquantised weights: a quantised head accepts less",
        )
    stored = sorted({_dtype_name(tensor.dtype) for tensor in weights.values()})
    return ok(name, f"stored as {', '.join(stored)}, run in {_dtype_name(dtype)}")


def check_values(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> CheckRow:
    """Look for numbers that are broken or were never trained.

    Args:
        tensors: As `read_tensors` gives them.
        dtype: Type that they will run in.

    Returns:
        Failed for NaN or infinity, a warning for constants and for what looks freshly initialised.
    """
    name = "weight values"
    weights = {key: tensor for key, tensor in tensors.items() if tensor.dtype in STORED_DTYPES}
    broken = not_finite(weights, dtype)
    if broken:
        return failed(
            name,
            f"NaN or infinity in {_some(broken)}, read as {_dtype_name(dtype)}",
            "the training run broke or the type is too narrow: take an earlier checkpoint, or "
            "another --dtype",
        )
    suspects = {
        key: reason
        for key, tensor in weights.items()
        if (reason := untrained_reason(tensor)) is not None
    }
    if suspects:
        shown = list(suspects.items())[:NAMED_TENSORS]
        more = f"; and {len(suspects) - len(shown)} more" if len(suspects) > len(shown) else ""
        return warning(
            name,
            f"{len(suspects)} of {len(weights)} tensors look untrained: "
            f"{'; '.join(f'{key} ({reason})' for key, reason in shown)}{more}",
            "make sure that this is the trained checkpoint and that its export kept every tensor",
        )
    return ok(name, f"{len(weights)} tensors, all finite, none constant or as initialised")


def untrained_reason(tensor: Tensor) -> str | None:
    """Say why a tensor looks as if it was never trained.

    Args:
        tensor: Floating point.

    Returns:
        The reason; None if the tensor looks trained.
    """
    weight = tensor.float()
    lowest, highest = float(weight.min()), float(weight.max())
    if lowest == highest and weight.numel() > 1:
        return f"every value is {lowest:g}"
    if weight.ndim < 2:  # noqa: PLR2004  vectors are too short for statistics
        return None
    std = float(weight.std())
    bound = weight.shape[-1] ** -0.5
    within = max(-lowest, highest) <= bound * (1 + STD_TOLERANCE)
    if within and _close(std, bound / 3**0.5):
        return "uniform, as torch.nn.Linear is initialised"
    kurtosis = float(((weight - weight.mean()) / std).pow(4).mean())
    if _close(std, NORMAL_STD) and abs(kurtosis - NORMAL_KURTOSIS) < KURTOSIS_TOLERANCE:
        return f"normal with deviation {NORMAL_STD}, as transformers initialises"
    return None


def check_head(tensors: Mapping[str, Tensor]) -> CheckRow:
    """Say which tables of the vocabulary the draft brings and which it borrows from the target.

    Args:
        tensors: As `read_tensors` gives them.

    Returns:
        Which ones; `load_draft` judges whether they fit.
    """
    parts = []
    for name, key in (("embedding", "embed_tokens.weight"), ("LM head", "lm_head.weight")):
        own = tensors.get(key)
        shape = "" if own is None else f", {list(own.shape)}"
        parts.append(f"{name}: {'shared' if own is None else 'its own'}{shape}")
    return ok("head", "; ".join(parts))


def _close(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= STD_TOLERANCE * wanted


def _some(names: Mapping[str, object] | list[str]) -> str:
    shown = list(names)[:NAMED_TENSORS]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
