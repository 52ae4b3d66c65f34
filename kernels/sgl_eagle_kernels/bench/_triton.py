"""A kernel that does nothing: what a launch costs beside the work."""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_eagle_kernels.launch import launch_options
from sgl_eagle_kernels.lm_head._triton.order import await_inputs


@triton.jit
def empty_kernel(OVERLAP: tl.constexpr):
    """Wait for the kernel before."""
    await_inputs(OVERLAP)


def launch_nothing() -> None:
    """Launch it on the current GPU, as the kernels of the LM head are launched."""
    device = torch.device("cuda", torch.cuda.current_device())
    empty_kernel[1,](num_warps=4, **launch_options(device))
