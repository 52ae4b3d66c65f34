"""One set of graphs and attention metadata for each verify size; switching never captures again."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from sgl_eagle.plugin import compat_graphs, compat_plain

logger = logging.getLogger(__name__)


class RuntimeStates:
    """The verify sizes of a server, with the graphs of each where the server decodes in graphs.

    Attributes:
        sizes: Verify sizes, ascending, root included.
        captured: Whether they have graphs.
    """

    def __init__(
        self, worker: Any, sizes: tuple[int, ...], *, capture: bool, keeps_features: bool
    ) -> None:
        """Prepare all sizes.

        Args:
            worker: Our worker; SGLang has captured the graphs of its limit.
            sizes: Verify sizes, ascending; the last is at most the server's limit.
            capture: Whether the server decodes in graphs.
            keeps_features: Whether plain decoding keeps the target's hidden states; not where
                nobody drafts.
        """
        self.sizes = sizes
        self.captured = capture
        self._worker = worker
        self._base: Any = None
        self._plain: Any = None
        self._states: dict[int, Any] = {}
        if not capture:
            return
        self._base = compat_graphs.current_verify_state(worker)
        limit = int(worker.speculative_num_draft_tokens)
        for size in reversed(sizes):
            known = size == limit
            self._states[size] = (
                self._base if known else compat_graphs.build_verify_state(worker, size)
            )
        if sizes[0] == 1:
            self._plain = compat_plain.build_plain_state(
                worker, self._states[1], keeps_features=keeps_features
            )
        logger.info("SGL_EAGLE verifies trees of %s tokens in graphs", list(sizes))

    def size_for(self, num_nodes: int) -> int:
        """The size that trees are padded to.

        Args:
            num_nodes: Nodes of the largest tree of the batch.

        Returns:
            The smallest prepared size that holds it.
        """
        return next(size for size in self.sizes if size >= num_nodes)

    def active(self, size: int) -> AbstractContextManager[None]:
        """Verify and draft-extend trees of one size.

        SGLang's own state, with which it prefills, is back afterwards.

        Args:
            size: One of `sizes`.

        Returns:
            To be entered.
        """
        return self._applied(self._states.get(size), size)

    def plain(self) -> AbstractContextManager[None]:
        """Decode without trees, and draft-extend one token a request.

        Only where 1 is among `sizes`. SGLang's own state is back afterwards.

        Returns:
            To be entered.
        """
        return self._applied(self._plain, 1)

    def _applied(self, state: Any, size: int) -> AbstractContextManager[None]:
        return _Applied(self._worker, size, state, self._base)


class _Applied:
    # A class, since a generator takes longer, and every round enters some.
    __slots__ = ("_base", "_limit", "_size", "_state", "_worker")

    def __init__(self, worker: Any, size: int, state: Any, base: Any) -> None:
        self._worker, self._size, self._state, self._base = worker, size, state, base

    def __enter__(self) -> None:
        draft = self._worker.draft_worker
        self._limit = draft.speculative_num_draft_tokens
        draft.speculative_num_draft_tokens = self._size
        if self._state is None:
            compat_graphs.set_eager_verify_size(self._worker, self._size)
        else:
            compat_graphs.apply_verify_state(self._worker, self._state)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._worker.draft_worker.speculative_num_draft_tokens = self._limit
        if self._state is None:
            compat_graphs.set_eager_verify_size(self._worker, self._limit)
        else:
            compat_graphs.apply_verify_state(self._worker, self._base)
