"""Small arrays between the host and the device: one copy each way, through pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes; a view of part of a buffer as another dtype must start at a multiple of its size."""


class HostTransfer:
    """Copies to and from one device.

    `send` does not wait: its staging memory is free again at the next `fetch`, which does. Callers
    alternate the two, or send less often than they fetch. On a CPU both copy and nothing waits.
    """

    def __init__(self, device: str) -> None:
        """Prepare for one device.

        Args:
            device: Where tensors live, e.g. "cuda" or "cpu".
        """
        self._device = torch.device(device)
        self._pinned = self._device.type == "cuda"
        self._outgoing = torch.empty(0, dtype=torch.uint8)
        self._incoming = torch.empty(0, dtype=torch.uint8)

    def fetch(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Copy a tensor to the host.

        Waits for everything that the current stream holds: the one host synchronisation of the
        decode round, once a level.

        Args:
            tensor: Contiguous, of a dtype that NumPy knows.

        Returns:
            An array of the same shape, owned by the caller.
        """
        if not self._pinned:
            return np.array(tensor.numpy())
        self._incoming = self._grown(self._incoming, tensor.nbytes)
        host = self._incoming[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return np.array(host.numpy())

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        """Copy arrays to the device in one piece.

        Args:
            arrays: Of any shapes, of dtypes that torch knows.

        Returns:
            One tensor for each, views of one allocation.
        """
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._outgoing = self._grown(self._outgoing, end)
        staged = self._outgoing[:end]
        for start, array in zip(starts, arrays, strict=True):
            dtype = torch.from_numpy(array[:0]).dtype
            part = staged[start : start + array.nbytes].view(dtype).view(array.shape)
            np.copyto(part.numpy(), array)
        sent = torch.empty(end, dtype=torch.uint8, device=self._device)
        sent.copy_(staged, non_blocking=True)
        return [
            sent[start : start + array.nbytes]
            .view(torch.from_numpy(array[:0]).dtype)
            .view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def send_into(self, target: Tensor, array: npt.NDArray[Any]) -> None:
        """Copy an array to where it belongs on the device.

        Args:
            target: Contiguous, of the array's shape and dtype.
            array: What is sent.
        """
        if not self._pinned:
            target.copy_(torch.from_numpy(array))
            return
        self._outgoing = self._grown(self._outgoing, array.nbytes)
        staged = self._outgoing[: array.nbytes].view(target.dtype).view(target.shape)
        np.copyto(staged.numpy(), array)
        target.copy_(staged, non_blocking=True)

    def _grown(self, buffer: Tensor, num_bytes: int) -> Tensor:
        if len(buffer) >= num_bytes:
            return buffer
        # A replaced buffer stays allocated until copies out of it are done: torch's pinned
        # allocator holds it back by an event.
        return torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
