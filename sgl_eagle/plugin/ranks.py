"""Tensor-parallel ranks: what the first of them sees and decides, all of them take.

Every rank drafts with shards of the same weights and sees nearly the same scores. Nearly is not
enough: two ranks that drafted different trees, or stopped at different depths, would wait for each
other for ever or verify a mixture. So numbers and decisions of the first rank are sent to the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Ranks:
    """The tensor-parallel ranks of one server, seen from one of them; one alone sends nothing.

    All ranks call the same methods in the same order.

    Attributes:
        leads: Whether this is the first rank.
        alone: Whether there is no other.
    """

    def __init__(self, group: Any) -> None:
        """Look at a group.

        Args:
            group: SGLang's `GroupCoordinator`.
        """
        self._group = group
        self.alone = int(group.world_size) == 1
        self.leads = int(group.rank_in_group) == 0

    def share_tensor(self, tensor: Tensor) -> None:
        """Overwrite a tensor by the first rank's, on its device; may be captured in a graph.

        Args:
            tensor: Contiguous, of one shape and dtype on all ranks.
        """
        if not self.alone:
            self._group.broadcast(tensor, src=0)

    def share(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The first rank's array.

        Args:
            array: Of one shape and dtype on all ranks; what it holds counts on the first alone.

        Returns:
            An array of that shape and dtype.
        """
        if self.alone:
            return array
        shared = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy())
        torch.distributed.broadcast(shared, src=self._group.ranks[0], group=self._group.cpu_group)
        return shared.numpy().view(array.dtype).reshape(array.shape)

    def share_text(self, text: str | None) -> str | None:
        """The first rank's text.

        Args:
            text: What counts on the first rank alone.

        Returns:
            The text, or None.
        """
        if self.alone:
            return text
        encoded = b"" if text is None else text.encode()
        length = int(self.share(np.array([-1 if text is None else len(encoded)]))[0])
        if length < 0:
            return None
        padded = encoded.ljust(length, b"\0")[:length]
        return bytes(self.share(np.frombuffer(padded, np.uint8))).decode()

    def clock(self, now: Callable[[], float]) -> Callable[[], float]:
        """A clock that shows the same on all ranks, so that they give up at the same moment.

        Args:
            now: Seconds, asked on the first rank.

        Returns:
            A clock that all ranks read equally often.
        """
        return lambda: self.share_number(now())

    def share_number(self, number: float) -> float:
        """The first rank's number.

        Args:
            number: What counts on the first rank alone.

        Returns:
            It, on all ranks.
        """
        return float(self.share(np.array([number]))[0])
