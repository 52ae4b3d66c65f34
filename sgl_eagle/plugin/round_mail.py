"""What a round of drafting tells the host: one row of numbers a request, copied whole.

Letters: R requests; T branches a request, which is also the number of children of a node; S draft
steps, that of the roots included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # the process that writes traces reads mail, and starts without torch
    from torch import Tensor

Mail = TypeVar("Mail", "Tensor", npt.NDArray[np.int32])
"""[R, width] int32, on the device or on the host; every part is a view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMail:
    """Where everything stands in a row.

    A level is nodes of T branches, T children each; the children of the roots stand where those of
    a first branch would.

    Attributes:
        branches: T.
        num_steps: S.
    """

    branches: int
    num_steps: int

    @property
    def width(self) -> int:
        """Numbers of a request."""
        return self._frontiers_at + (self.num_steps - 1) * self.branches

    def lengths(self, mail: Mail) -> Mail:
        """Cached tokens before each root.

        Args:
            mail: All rows.

        Returns:
            [R].
        """
        return mail[:, 0]

    def roots(self, mail: Mail) -> Mail:
        """Tokens of the roots.

        Args:
            mail: All rows.

        Returns:
            [R].
        """
        return mail[:, 1]

    def level(self, mail: Mail, index: int) -> Mail:
        """One level.

        Args:
            mail: All rows.
            index: 0 for the children of the roots, else that of the draft step and 1.

        Returns:
            [R, 2, T, T]: target ids of the children, and their float32 log-probabilities' bits.
        """
        start = 2 + index * self._level_size
        shape = (len(mail), 2, self.branches, self.branches)
        return mail[:, start : start + self._level_size].reshape(shape)

    def log_prob_bits(self, mail: Mail, num_levels: int) -> Mail:
        """Log-probabilities of the first levels.

        Args:
            mail: All rows.
            num_levels: How many.

        Returns:
            [R, num_levels, T, T]: bits of float32; the first level has one branch.
        """
        shape = (len(mail), num_levels, 2, self.branches, self.branches)
        return mail[:, 2 : 2 + num_levels * self._level_size].reshape(shape)[:, :, 1]

    def frontier(self, mail: Mail, step: int) -> Mail:
        """The nodes that a draft step chose to expand.

        Args:
            mail: All rows.
            step: 0-based.

        Returns:
            [R, T]: columns of the level before, best first; -1 is padding.
        """
        start = self._frontiers_at + step * self.branches
        return mail[:, start : start + self.branches]

    def frontiers(self, mail: Mail) -> Mail:
        """The nodes that all draft steps chose.

        Args:
            mail: All rows.

        Returns:
            [R, (S - 1) * T]: the frontiers one after the other.
        """
        return mail[:, self._frontiers_at : self.width]

    @property
    def _level_size(self) -> int:
        return 2 * self.branches**2

    @property
    def _frontiers_at(self) -> int:
        return 2 + self.num_steps * self._level_size
