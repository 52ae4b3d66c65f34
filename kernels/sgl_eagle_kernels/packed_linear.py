"""Products with weights that are laid out for a CPU once.

In half precision on a CPU, a product with an ordinary weight spends up to half of its time on
bringing that weight into oneDNN's blocked layout, in every call. Doing it once costs a second copy
of the weight.

A product of few rows then takes as long as reading its weight does. A model that only proposes can
read half as much: eight bits an entry and one scale a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

MOST_INT8 = 127
_INT8_LANES = 16  # entries of a row that torch's kernel reads at once, without a tail


class Int8Weight(NamedTuple):
    """A weight rounded to eight bits.

    Attributes:
        steps: [out, in] int8, contiguous.
        scale: [out] bfloat16 factor of each row.
    """

    steps: Tensor
    scale: Tensor


PackedWeight = Tensor | Int8Weight
"""What `packed_linear` multiplies with: an opaque tensor of oneDNN's, or eight bits."""


def pack_weight(weight: Tensor) -> Tensor | None:
    """Copy a weight into oneDNN's layout.

    Args:
        weight: [out, in].

    Returns:
        An opaque tensor for `packed_linear`; None where an ordinary product is as fast: on other
        devices, in float32, and in builds of torch without oneDNN's linear operators.
    """
    half = weight.dtype in {torch.bfloat16, torch.float16}
    if not (weight.device.type == "cpu" and half and _has_operators()):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


def has_int8_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products with eight bits are faster than those in the weight's own type.

    Args:
        dtype: Of weights and activations.
        device: Where they are.

    Returns:
        True in bfloat16 on a CPU; torch multiplies other types entry by entry.
    """
    return device.type == "cpu" and dtype == torch.bfloat16


def pack_int8(weight: Tensor) -> PackedWeight | None:
    """Round a weight to eight bits.

    Args:
        weight: [out, in] bfloat16 on a CPU.

    Returns:
        For `packed_linear`; what `pack_weight` gives where `in` is no multiple of 16.
    """
    if weight.shape[1] % _INT8_LANES:
        return pack_weight(weight)
    steps, scale = quantize_rows(weight.detach())
    return Int8Weight(steps.contiguous(), scale.bfloat16())


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Eight bits an entry, one scale a row.

    Args:
        weight: [out, in].

    Returns:
        [out, in] int8 in [-127, 127] and [out] float32 scales that bfloat16 holds exactly. A scale
        of a row that is not finite is not finite, and reaches every product with that row.
    """
    wide = weight.float()
    scale = (wide.abs().amax(dim=1) / MOST_INT8).bfloat16().float()
    steps = (wide / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round()
    return steps.nan_to_num(0.0).clamp(-MOST_INT8, MOST_INT8).to(torch.int8), scale


def packed_linear(
    x: Tensor, weight: Tensor, packed: PackedWeight | None, bias: Tensor | None = None
) -> Tensor:
    """`functional.linear`, in the packed layout where there is one.

    Args:
        x: [*, in].
        weight: [out, in]; not read where there is a packed one.
        packed: Of that weight, from `pack_weight` or `pack_int8`.
        bias: [out].

    Returns:
        [*, out].
    """
    if packed is None:
        return functional.linear(x, weight, bias)
    if isinstance(packed, Int8Weight):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        rounded = torch._weight_int8pack_mm(rows, packed.steps, packed.scale)
        rounded = rounded.view(*x.shape[:-1], len(packed.scale))
        return rounded if bias is None else rounded + bias
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def _has_operators() -> bool:
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in names
    )
