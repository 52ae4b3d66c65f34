"""How kernels are launched on the device of a tensor."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

INTERPRETED_MULTIPROCESSORS = 2
"""Of Triton's interpreter: more than one, so that tests walk over tiles as a GPU does."""
INTERPRETED_SHARED_MEMORY = 1 << 18
OVERLAP_CAPABILITY = (9, 0)
CARVEOUT_ATTRIBUTE = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
CARVEOUT = 100  # percent
_asked: dict[int, int] = {}


@cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one that it waits for has ended.

    Args:
        device: Of the tensors.

    Returns:
        True on GPUs with programmatic dependent launch.
    """
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= OVERLAP_CAPABILITY


@cache
def copies_tensors(device: torch.device) -> bool:
    """Whether an engine copies blocks of tensors to programs.

    Args:
        device: Of the tensors.

    Returns:
        True on GPUs that also overlap launches, and in Triton's interpreter.
    """
    return device.type != "cuda" or overlaps_launches(device)


@cache
def count_multiprocessors(device: torch.device) -> int:
    """Multiprocessors to spread programs over.

    Args:
        device: Of the tensors.

    Returns:
        Their number.
    """
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Shared memory that one program can have.

    Args:
        device: Of the tensors.

    Returns:
        Bytes.
    """
    if device.type != "cuda":
        return INTERPRETED_SHARED_MEMORY
    # torch does not tell. Imported late: only CUDA machines need Triton.
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def launch_options(device: torch.device) -> dict[str, bool]:
    """Arguments that every launch of an overlapping kernel takes.

    The kernel has a constexpr `OVERLAP` and calls `await_inputs` before it touches memory that
    another kernel writes.

    Args:
        device: Of the tensors.

    Returns:
        Keywords.
    """
    if not overlaps_launches(device):
        return {"OVERLAP": False}  # Triton's interpreter knows no launch options
    return {"OVERLAP": True, "launch_pdl": True}


def leave_shared_memory(kernel: Any) -> None:  # noqa: ANN401  Triton types no compiled kernel
    """Let programs of the next kernel start on a multiprocessor while those of this one run there.

    A multiprocessor divides its memory into cache and shared memory as suits the kernel that comes
    first, and divides it anew only when it is empty. So a small kernel asks for shared memory that
    it does not need itself.

    Args:
        kernel: What a launch returned; None in Triton's interpreter.
    """
    function = getattr(kernel, "function", None)
    if function is not None and _asked.get(function) != CARVEOUT:
        _asked[function] = CARVEOUT
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuFuncSetAttribute(ctypes.c_void_p(function), CARVEOUT_ATTRIBUTE, CARVEOUT)
