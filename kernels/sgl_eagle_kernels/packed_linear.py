"""Products with weights that lie as oneDNN reads them.

In half precision on a CPU, a product with an ordinary weight spends up to half of its time on
bringing that weight into oneDNN's blocked layout, in every call. Doing it once costs a second copy
of the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


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


def packed_linear(
    x: Tensor, weight: Tensor, packed: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    """`functional.linear`, in the packed layout where there is one.

    Args:
        x: [*, in].
        weight: [out, in]; not read where there is a packed one.
        packed: Of that weight, from `pack_weight`.
        bias: [out].

    Returns:
        [*, out].
    """
    if packed is None:
        return functional.linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def _has_operators() -> bool:
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in names
    )
