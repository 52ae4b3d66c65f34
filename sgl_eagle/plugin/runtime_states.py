"""One set of graphs and attention metadata for each verify size; switching never captures again."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from sgl_eagle.plugin import compat_graphs, compat_plain

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    graphs: Any  # None where there are none
    size: int


class RuntimeStates:
    """The verify sizes of a server, with the graphs of each where the server decodes in graphs.

    A state stays in use until another is: most rounds are like the one before.

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
        self._sized: dict[int, _State] = {}
        self._plain = _State(None, 1)
        limit = int(worker.speculative_num_draft_tokens)
        if capture:
            self._base = compat_graphs.current_verify_state(worker)
            for size in reversed(sizes):
                known = size == limit
                graphs = self._base if known else compat_graphs.build_verify_state(worker, size)
                self._sized[size] = _State(graphs, size)
            if sizes[0] == 1:
                plain = compat_plain.build_plain_state(
                    worker, self._sized[1].graphs, keeps_features=keeps_features
                )
                self._plain = _State(plain, 1)
            logger.info("SGL_EAGLE verifies trees of %s tokens in graphs", list(sizes))
        self._resting = self._current = _State(self._base, limit)

    def size_for(self, num_nodes: int) -> int:
        """The size that trees are padded to.

        Args:
            num_nodes: Nodes of the largest tree of the batch.

        Returns:
            The smallest prepared size that holds it.
        """
        return next(size for size in self.sizes if size >= num_nodes)

    def use(self, size: int) -> None:
        """Verify and draft-extend trees of one size from now on.

        Args:
            size: One of `sizes`.
        """
        state = self._sized.get(size)
        if state is None:
            state = self._sized[size] = _State(None, size)
        self._switch_to(state)

    def use_plain(self) -> None:
        """Decode without trees from now on, and draft-extend one token a request.

        Only where 1 is among `sizes`.
        """
        self._switch_to(self._plain)

    def rest(self) -> None:
        """Put SGLang's own state back, with which it prefills."""
        self._switch_to(self._resting)

    def _switch_to(self, state: _State) -> None:
        before, worker = self._current, self._worker
        if state is before:
            return
        self._current = state
        worker.draft_worker.speculative_num_draft_tokens = state.size
        if self._base is None:
            compat_graphs.set_eager_verify_size(worker, state.size)
            return
        if before.graphs is None:
            compat_graphs.set_eager_verify_size(worker, self._resting.size)
        # A size without graphs is verified by the attention that SGLang prefills with.
        compat_graphs.apply_verify_state(worker, state.graphs or self._base)
        if state.graphs is None:
            compat_graphs.set_eager_verify_size(worker, state.size)
