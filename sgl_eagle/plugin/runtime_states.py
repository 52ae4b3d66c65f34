"""One set of graphs and attention metadata for each verify size; switching never captures again."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from sgl_eagle.plugin import compat, compat_graphs, compat_plain

logger = logging.getLogger(__name__)


class RuntimeStates:
    """The verify sizes of a server, with the graphs of each where the server decodes in graphs.

    Attributes:
        sizes: Verify sizes, ascending, root included.
        captured: Whether they have graphs.
    """

    def __init__(
        self, worker: Any, sizes: tuple[int, ...], *, capture: bool, window: int | None
    ) -> None:
        """Prepare all sizes.

        Args:
            worker: Our worker; SGLang has captured the graphs of its limit.
            sizes: Verify sizes, ascending; the last is at most the server's limit.
            capture: Whether the server decodes in graphs.
            window: Tokens of a request with which the draft catches up after plain rounds, one of
                `sizes`; None where nobody drafts, so that plain decoding keeps no hidden states.
        """
        self.sizes = sizes
        self.captured = capture
        self._worker = worker
        self._base: Any = None
        self._plain: Any = None
        self._catching_up: Any = None
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
                worker, self._states[1], keeps_features=window is not None
            )
            if window is not None:
                self._catching_up = compat_graphs.build_catch_up_state(
                    worker, self._states[window], window
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

    @contextlib.contextmanager
    def active(self, size: int) -> Iterator[None]:
        """Verify and draft-extend trees of one size.

        SGLang's own state, with which it prefills, is back afterwards.

        Args:
            size: One of `sizes`.

        Yields:
            None.
        """
        with self._applied(self._states.get(size), size):
            yield

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Decode without trees, and draft-extend one token a request.

        Only where 1 is among `sizes`. SGLang's own state is back afterwards.

        Yields:
            None.
        """
        with self._applied(self._plain, 1):
            yield

    @contextlib.contextmanager
    def catching_up(self, window: int) -> Iterator[None]:
        """Draft-extend a window of tokens whose scores nobody reads.

        Only where 1 is among `sizes`. SGLang's own state is back afterwards.

        Args:
            window: Tokens of a request; as prepared.

        Yields:
            None.
        """
        scores_nothing = compat.without_draft_scores(self._worker.draft_worker)
        with self._applied(self._catching_up, window), scores_nothing:
            yield

    @contextlib.contextmanager
    def _applied(self, state: Any, size: int) -> Iterator[None]:
        draft = self._worker.draft_worker
        limit = draft.speculative_num_draft_tokens
        draft.speculative_num_draft_tokens = size
        if state is not None:
            compat_graphs.apply_verify_state(self._worker, state)
        try:
            yield
        finally:
            draft.speculative_num_draft_tokens = limit
            if state is not None:
                compat_graphs.apply_verify_state(self._worker, self._base)
