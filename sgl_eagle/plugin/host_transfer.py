"""Small arrays between the host and device, through pinned memory, none waited for before its time.

A copy to the host is begun when the device is told to compute what it copies, and waited for when
the host wants it; work that was launched in between goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes; a view of part of a buffer as another dtype must start at a multiple of its size."""


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


_EMPTY = torch.empty(0, dtype=torch.uint8)


class HostTransfer:
    """Copies to and from one device, with numbered slots for several arrays on their way.

    What is sent must have left its memory before the same method sends again from the same slot:
    callers begin each round by waiting for a copy that was begun after everything the round before
    had sent, and use a slot once a round. On a CPU every copy is done at once.
    """

    def __init__(self, device: str, num_slots: int) -> None:
        """Prepare for one device.

        Args:
            device: Where tensors live, e.g. "cuda" or "cpu".
            num_slots: Arrays on their way at the same time, in each direction.
        """
        self._device = torch.device(device)
        self._pinned = self._device.type == "cuda"
        self._incoming = [_EMPTY] * num_slots
        self._outgoing = [_EMPTY] * num_slots
        self._together = [_EMPTY]
        self._arriving = [_EMPTY] * num_slots  # the part of a slot that its latest copy fills
        self._arrived = [_EMPTY.numpy()] * num_slots  # the same memory
        self._events = [torch.cuda.Event() for _ in range(num_slots)] if self._pinned else []

    def begin(self, slot: int, tensor: Tensor) -> None:
        """Copy a tensor to the host, once the current stream has computed it.

        Args:
            slot: Where to; what it held is lost.
            tensor: Of a dtype that NumPy knows; later work of the stream may write it again.
        """
        self.post(slot, tensor)
        if self._pinned:
            self._events[slot].record()

    def wait(self, slot: int) -> npt.NDArray[Any]:
        """What was copied to a slot: the host's wait for the device, though not for later work.

        Args:
            slot: Where `begin` has copied to.

        Returns:
            An array of the tensor's shape, owned by the caller.
        """
        if self._pinned:
            self._events[slot].synchronize()
        return self.read(slot)

    def post(self, slot: int, tensor: Tensor) -> None:
        """As `begin`, of a copy that nobody waits for.

        Args:
            slot: Where to; what it held is lost.
            tensor: Of a dtype that NumPy knows; later work of the stream may write it again.
        """
        host = self._arriving[slot]
        if host.shape != tensor.shape or host.dtype != tensor.dtype:
            host = self._arriving[slot] = self._place(self._incoming, slot, tensor)
            self._arrived[slot] = host.numpy()
        host.copy_(tensor, non_blocking=True)

    def read(self, slot: int) -> npt.NDArray[Any]:
        """What has arrived, where the caller knows that it has.

        Args:
            slot: Where `post` has copied to.

        Returns:
            An array of the tensor's shape, owned by the caller.
        """
        return self._arrived[slot].copy()

    def send_into(self, slot: int, target: Tensor, array: npt.NDArray[Any]) -> None:
        """Copy an array to where it belongs on the device.

        Args:
            slot: Where from.
            target: Contiguous, of the array's shape and dtype.
            array: What is sent.
        """
        host = self._place(self._outgoing, slot, target)
        np.copyto(host.numpy(), array)
        target.copy_(host, non_blocking=True)

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
        staged = self._grown(self._together, 0, end)[:end]
        bytes_of_staged = staged.numpy()
        for start, array in zip(starts, arrays, strict=True):
            part = bytes_of_staged[start : start + array.nbytes].view(array.dtype)
            np.copyto(part.reshape(array.shape), array)
        sent = torch.empty(end, dtype=torch.uint8, device=self._device)
        sent.copy_(staged, non_blocking=True)
        return [
            sent[start : start + array.nbytes].view(_torch_dtype(array.dtype)).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def _place(self, memory: list[Tensor], slot: int, like: Tensor) -> Tensor:
        buffer = self._grown(memory, slot, like.nbytes)
        return buffer[: like.nbytes].view(like.dtype).view(like.shape)

    def _grown(self, memory: list[Tensor], slot: int, num_bytes: int) -> Tensor:
        if len(memory[slot]) < num_bytes:
            # A replaced buffer stays allocated until copies out of it are done: torch's pinned
            # allocator holds it back by an event.
            memory[slot] = torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        return memory[slot]
