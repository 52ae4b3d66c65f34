"""Rounds in which nobody drafts: SGLang's own decoding; the draft catches up now and then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sgl_eagle.plugin import compat, compat_draft_cache, compat_plain
from sgl_eagle.plugin.cache_writer import CacheWriter, make_cache_writer
from sgl_eagle.plugin.draft_backlog import DraftBacklog
from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle.plugin.runtime_states import RuntimeStates
from sgl_eagle_harness.shared_rows import same_count
from sgl_eagle_harness.types import IntArray


def prepare_plain_rounds(worker: Any, states: RuntimeStates, window: int | None) -> PlainRounds:
    """Prepare a worker's plain rounds.

    Args:
        worker: Our worker, its cache allocated.
        states: Its graphs, those of verifying one token among them.
        window: Tokens of a request with which the draft catches up at most, one of the states'
            sizes; None if nobody will ever draft.

    Returns:
        They.
    """
    if window is None:
        return PlainRounds(worker, states, None, None)
    draft_worker = worker.draft_worker
    backlog = DraftBacklog(
        num_rows=len(compat.token_table(worker)),
        window=window,
        features=compat_draft_cache.target_features(draft_worker),
    )
    with compat.draft_context():
        writer = make_cache_writer(draft_worker, backlog, capture=states.captured)
    return PlainRounds(worker, states, backlog, writer)


class PlainRounds:
    """Decodes one token a request without a tree."""

    def __init__(
        self,
        worker: Any,
        states: RuntimeStates,
        backlog: DraftBacklog | None,
        writer: CacheWriter | None,
    ) -> None:
        """Take over what was prepared.

        Args:
            worker: Our worker.
            states: Its graphs.
            backlog: Keeps what the draft has not seen; None if nobody will ever draft.
            writer: Writes the draft's cache alone; None where a whole pass must.
        """
        self._worker, self._states = worker, states
        self._backlog, self._writer = backlog, writer

    def num_unseen(self, names: Sequence[str]) -> IntArray:
        """Tokens that the draft has not seen, the root excluded.

        Args:
            names: Of all B requests that decode.

        Returns:
            [B] int64.
        """
        if self._backlog is None or self._backlog.is_empty:
            return same_count(0, len(names))
        return self._backlog.counts(names)

    def forget(self, names: Sequence[str]) -> None:
        """Note that the draft has seen all of some requests, as after a prefill.

        Args:
            names: Theirs.
        """
        if self._backlog is not None:
            self._backlog.clear(names)

    def assume_unseen(self, names: Sequence[str], num_tokens: int) -> None:
        """Let made-up requests be such that have decoded plainly for a while.

        Args:
            names: Theirs; others are forgotten.
            num_tokens: Tokens of each that the draft has not seen, the root excluded.
        """
        if self._backlog is not None:
            self._backlog.assume(names, num_tokens)

    def catch_up(
        self,
        batch: Any,
        names: Sequence[str],
        num_unseen: IntArray,
        clock: RoundClock,
        *,
        at_once: bool,
    ) -> None:
        """Let the draft see what it has not, if it must.

        Where somebody drafts, the batch's draft input is replaced. Else the draft's cache is
        written alone: a plain round follows, after which the draft is behind again.

        Args:
            batch: The running batch of B requests.
            names: Theirs.
            num_unseen: [B] int64 from `num_unseen`.
            clock: Takes the time.
            at_once: Whether somebody drafts in this round; else it may wait for a full window.
        """
        backlog = self._backlog
        if backlog is None or backlog.is_empty:
            return
        most = int(num_unseen.max(initial=0))
        if not most or not (at_once or most == backlog.window):
            return
        counts = torch.from_numpy(num_unseen)
        with clock.stage("extend"), compat.draft_context():
            if at_once or self._writer is None:
                caught_up = self._run_draft(batch, counts, self._states.size_for(most), backlog)
                if at_once:
                    batch.spec_info = caught_up
            else:
                self._writer.write(batch, counts)
        backlog.clear(names)

    def _run_draft(
        self, batch: Any, counts: torch.Tensor, num_tokens: int, backlog: DraftBacklog
    ) -> Any:
        self._states.use(num_tokens)
        return compat_plain.catch_up(
            self._worker, batch, counts=counts, take=backlog.take, num_tokens=num_tokens
        )

    def decode(
        self,
        batch: Any,
        names: Sequence[str],
        clock: RoundClock,
        on_publish: Callable[[Any], None] | None,
    ) -> Any:
        """Decode one token a request.

        Args:
            batch: The running batch, which SGLang need not verify; no window is full.
            names: Of its requests.
            clock: Takes the time.
            on_publish: Called with the new lengths, if given.

        Returns:
            A `GenerationBatchResult`.
        """
        backlog = self._backlog
        with clock.stage("verify"):
            self._states.use_plain()
            result = compat_plain.run_decode(
                self._worker,
                batch,
                keeps_features=backlog is not None,
                on_publish=on_publish,
            )
            if backlog is not None:
                with clock.stage("pack"):
                    backlog.add(
                        names,
                        rows=batch.req_pool_indices,
                        lengths=batch.seq_lens,
                        tokens=result.next_token_ids,
                        features=result.logits_output.hidden_states,
                    )
        return result
