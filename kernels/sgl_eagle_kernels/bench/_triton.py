"""Kernels that show what the GPU can do: one does nothing, one only reads, one only copies."""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_eagle_kernels.launch import launch_options
from sgl_eagle_kernels.lm_head._triton.order import await_inputs

BLOCK = 8192


@triton.jit
def empty_kernel(OVERLAP: tl.constexpr):
    """Wait for the kernel before."""
    await_inputs(OVERLAP)


def launch_nothing() -> None:
    """Launch it on the current GPU, as the kernels of the LM head are launched."""
    device = torch.device("cuda", torch.cuda.current_device())
    empty_kernel[1,](num_warps=4, **launch_options(device))


@triton.jit
def read_kernel(source_ptr, largest_ptr, BLOCK: tl.constexpr):
    """Largest of BLOCK integers."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(largest_ptr + tl.program_id(0), tl.max(tl.load(source_ptr + at), axis=0))


@triton.jit
def copy_kernel(source_ptr, target_ptr, BLOCK: tl.constexpr):
    """Copy BLOCK integers."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + at, tl.load(source_ptr + at))


def read_all(source: Tensor, largest: Tensor) -> None:
    """Read a tensor once.

    Args:
        source: [P * BLOCK] int32.
        largest: [P] int32, overwritten.
    """
    read_kernel[len(largest),](source, largest, BLOCK=BLOCK, num_warps=8)


def copy_all(source: Tensor, target: Tensor) -> None:
    """Read a tensor once and write it once.

    Args:
        source: [P * BLOCK] int32.
        target: Of the same shape, overwritten.
    """
    copy_kernel[len(source) // BLOCK,](source, target, BLOCK=BLOCK, num_warps=8)
