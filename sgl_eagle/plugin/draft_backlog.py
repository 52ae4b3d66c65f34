"""What plain decoding leaves for the draft to catch up with.

A plain round that may be followed by drafts must give the draft's cache its token. Doing so in
every round would cost a pass of the draft each; so tokens and the target's features are kept, and
the draft takes a window of them at once: when the window is full, or before somebody drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgl_eagle_harness.types import IntArray
from sgl_eagle_kernels.feature_ring import keep_round

LEAST_WINDOW = 16
"""On an H200 writing 16 tokens of each of 128 requests to the draft's cache takes 0.51 ms, a plain
round 6.5 ms (2026-11-30, an 8B-class pair, SGLang 0.5.17): half a percent of the rounds between."""


def window_size(sizes: tuple[int, ...]) -> int:
    """Tokens of a request that the draft takes at once after plain rounds.

    Args:
        sizes: Verify sizes of the server, ascending: draft-extend is prepared for those.

    Returns:
        The smallest size that makes the draft's pass rare, else the largest.
    """
    return next((size for size in sizes if size >= LEAST_WINDOW), sizes[-1])


class DraftBacklog:
    """Tokens and features of plain rounds, by request.

    The host counts them, since a plain round adds one to each of its requests; the device keeps
    them at the position modulo the window, so that neither waits for the other.

    Attributes:
        window: Tokens of a request that are kept at most.
        device: Where they are kept.
    """

    def __init__(
        self, *, num_rows: int, window: int, features: tuple[int, torch.dtype, Any]
    ) -> None:
        """Start with nothing.

        Args:
            num_rows: Rows of SGLang's table of slots.
            window: Tokens of a request that are kept at most.
            features: F, dtype and device of the target's hidden states.
        """
        size, dtype, device = features
        self.window = window
        self.device = device
        self._names: Sequence[str] = ()
        self._counts = np.zeros(0, np.int64)
        self._num_kept = 0
        shape = (num_rows, window)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._features = torch.zeros((*shape, size), dtype=dtype, device=device)
        # What every round launches is compiled before the first: here for a row of padding.
        padding = torch.zeros(1, dtype=torch.int64, device=device)
        nothing = torch.zeros((1, size), dtype=dtype, device=device)
        for dtype in (torch.int64, torch.int32):  # SGLang's greedy and sampled tokens
            self._keep(padding.to(dtype), nothing, rows=padding, lengths=padding)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept of any request, as in a server that always speculates."""
        return not self._num_kept

    def counts(self, names: Sequence[str]) -> IntArray:
        """How much is kept of some requests; others are forgotten.

        Args:
            names: Of all B requests that decode. Not to be changed afterwards.

        Returns:
            [B] int64, at most `window`.
        """
        self._follow(names)
        return self._counts.copy()

    def clear(self, names: Sequence[str]) -> None:
        """Note that the draft has seen everything of some requests.

        Args:
            names: Theirs.
        """
        if self._are_followed(names):
            self._counts.fill(0)
            self._num_kept = 0
        else:
            seen = set(names)
            self._counts[[name in seen for name in self._names]] = 0
            self._num_kept = int(self._counts.sum())

    def assume(self, names: Sequence[str], num_tokens: int) -> None:
        """Count as kept what was not, of requests that do not exist.

        Args:
            names: Theirs; others are forgotten.
            num_tokens: Of each, less than `window` as long as nothing was ever kept.
        """
        self._follow(names)
        self._counts[:] = num_tokens
        self._num_kept = num_tokens * len(names)

    def add(
        self,
        names: Sequence[str],
        *,
        rows: Tensor,
        lengths: Tensor,
        tokens: Tensor,
        features: Tensor,
    ) -> None:
        """Keep what a plain round has decoded; no window may be full.

        Args:
            names: Of all B requests that decode; others are forgotten.
            rows: [B] int64, theirs in SGLang's table of slots.
            lengths: [B] int64, cached tokens before the round.
            tokens: [B], decoded.
            features: [B, F] hidden states of the target from which they were.
        """
        self._keep(tokens, features, rows=rows, lengths=lengths)
        self._follow(names)
        self._counts += 1
        self._num_kept += len(names)

    def take(self, rows: Tensor, starts: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """What is kept, from the oldest token on.

        Args:
            rows: [B] int64, in SGLang's table of slots.
            starts: [B] int64, position of the oldest token kept of each.
            num_tokens: n, tokens of each, at most `window`.

        Returns:
            [B * n] int64 tokens and [B * n, F] features; those beyond a request's count are of any
            age.
        """
        places = (starts[:, None] + torch.arange(num_tokens, device=starts.device)) % self.window
        index = (rows[:, None], places)
        return self._tokens[index].flatten(), self._features[index].flatten(0, 1)

    def window_before(self, rows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the places of some requests hold, in whatever order that is.

        Args:
            rows: [B] int64, in SGLang's table of slots.
            lengths: [B] int64, cached tokens of each.

        Returns:
            [B, window] int64 tokens, [B, window, F] features, and [B, window] int64 positions of
            the last `window` cached tokens, below 0 where there are fewer; of a request that keeps
            c, all but the last c positions hold something of any age.
        """
        last = (lengths - 1)[:, None]
        ages = (last - torch.arange(self.window, device=lengths.device)) % self.window
        return self._tokens[rows], self._features[rows], last - ages

    def _keep(self, tokens: Tensor, features: Tensor, *, rows: Tensor, lengths: Tensor) -> None:
        keep_round(
            tokens,
            features,
            rows=rows,
            positions=lengths,
            kept_tokens=self._tokens,
            kept_features=self._features,
        )

    def _follow(self, names: Sequence[str]) -> None:
        if self._are_followed(names):
            return
        known = dict(zip(self._names, self._counts.tolist(), strict=True))
        self._names = names
        self._counts = np.array([known.get(name, 0) for name in names], np.int64)
        self._num_kept = int(self._counts.sum())

    def _are_followed(self, names: Sequence[str]) -> bool:
        # Mostly the very list of the round before.
        return self._names is names or self._names == names
