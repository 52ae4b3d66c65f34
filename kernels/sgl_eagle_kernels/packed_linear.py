"""Products with weights that are laid out for a CPU once.

In half precision on a CPU, a product with an ordinary weight spends up to half of its time on
bringing that weight into oneDNN's blocked layout, in every call. Doing it once costs a second copy
of the weight.

A product of few rows then takes as long as reading its weight does. A model that only proposes can
read half as much: eight bits an entry and one scale a row. Where the CPU multiplies eight bits with
eight bits (VNNI), inputs are rounded too, with one scale for each of their rows: the product then
costs little more for eight rows than for one.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

MOST_INT8 = 127
_INT8_LANES = 16  # entries of a row that torch's kernel reads at once, without a tail
_ZERO_POINT = 128  # inputs are unsigned: VNNI multiplies unsigned with signed bytes


class Int8Weight(NamedTuple):
    """A weight rounded to eight bits.

    Attributes:
        steps: [out, in] int8, contiguous, or the same in oneDNN's layout.
        scale: [out] factor of each row: bfloat16, or float32 in oneDNN's layout.
        zero_points: [out] int32 zeros in oneDNN's layout, whose products round their inputs too;
            None otherwise.
    """

    steps: Tensor
    scale: Tensor
    zero_points: Tensor | None


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
    if not rounds_inputs():
        return Int8Weight(steps.contiguous(), scale.bfloat16(), None)
    laid_out = torch.ops.onednn.qlinear_prepack(steps.contiguous(), None)
    return Int8Weight(laid_out, scale, torch.zeros(len(scale), dtype=torch.int32))


@cache
def rounds_inputs() -> bool:
    """Whether products with eight-bit weights round their inputs to eight bits too.

    Returns:
        True on CPUs with VNNI, in builds of torch that have oneDNN's eight-bit products. Without
        VNNI sums of two such products overflow.
    """
    supports_vnni = getattr(torch.cpu, "_is_vnni_supported", None)
    return (
        supports_vnni is not None
        and supports_vnni()
        and torch.backends.mkldnn.is_available()
        and all(
            hasattr(torch.ops.onednn, name) for name in ("qlinear_prepack", "qlinear_pointwise")
        )
    )


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
        rows = x.reshape(-1, x.shape[-1])
        rounded = int8_product(rows, packed).to(x.dtype).view(*x.shape[:-1], len(packed.scale))
        return rounded if bias is None else rounded + bias
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def int8_product(rows: Tensor, weight: Int8Weight) -> Tensor:
    """Multiply with a weight in eight bits.

    Args:
        rows: [n, in] bfloat16.
        weight: [out, in].

    Returns:
        [n, out]; float32 where inputs are rounded, else bfloat16. A row of inputs that is not
        finite gives one that is not finite.
    """
    if weight.zero_points is None:
        return torch._weight_int8pack_mm(rows.contiguous(), weight.steps, weight.scale)
    wide = rows.float()
    scale = torch.linalg.vector_norm(wide, torch.inf, dim=1, keepdim=True) / MOST_INT8
    steps = wide / scale.clamp(min=torch.finfo(torch.float32).tiny)
    steps = steps.round_().add_(_ZERO_POINT).to(torch.uint8)
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        steps, 1.0, _ZERO_POINT, weight.steps, weight.scale, weight.zero_points,
        None, 1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    return product.mul_(scale)


def _has_operators() -> bool:
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in names
    )
