"""SGLang's relay between the steps of a batch under overlap scheduling."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class _Kept(NamedTuple):
    # What a step leaves, of rows of the relay that have not been told of it.
    rows: Any
    values: Any


class _HandsOnLengths:
    """Of a `FutureMap`: lengths of the texts, published by a step for the next."""

    device: Any
    needs_cpu_seq_lens: bool
    new_seq_lens_buf: Any
    _lengths: _Kept | None = None
    _lengths_known: Any = None  # an event: the device has computed them

    def publish(self, future_indices: Any, new_seq_lens: Any, *args: Any) -> None:
        if self.needs_cpu_seq_lens or not len(future_indices):
            super().publish(future_indices, new_seq_lens, *args)  # type: ignore[misc]
            return
        if self._lengths_known is None:
            self._lengths_known = torch.get_device_module(self.device).Event()
        lengths = new_seq_lens.to(self.new_seq_lens_buf.dtype)
        self._lengths_known.record()
        self._lengths = _Kept(future_indices, lengths)

    def resolve_seq_lens_cpu(self, batch: Any, **how: Any) -> None:
        kept, self._lengths = self._lengths, None
        if kept is not None and _is_of(batch.spec_info, kept.rows):
            # They come from the stream of the steps, which is the one that reads them.
            batch.seq_lens = kept.values
            batch.seq_lens_cpu = batch.seq_lens_sum = None
            return
        if kept is not None:
            self._lengths_known.wait()
            self.new_seq_lens_buf[kept.rows] = kept.values
        super().resolve_seq_lens_cpu(batch, **how)  # type: ignore[misc]


class _HandsOnTokens:
    """Of a `FutureMap`: what a step leaves besides."""

    output_tokens_buf: Any
    _handed_on: tuple[Any, ...] | None = None  # children and states of the batch that runs
    _tokens: _Kept | None = None

    def _resolve_spec_extras(self, batch: Any) -> None:
        kept, self._tokens = self._tokens, None
        draft_input = batch.spec_info
        if kept is not None and _is_of(draft_input, kept.rows):
            draft_input.bonus_tokens = kept.values
        else:
            if kept is not None:
                self.output_tokens_buf[kept.rows] = kept.values
            super()._resolve_spec_extras(batch)  # type: ignore[misc]
        self._handed_on = None if draft_input is None else _children(draft_input)

    def stash(self, future_indices: Any, payload: Any) -> None:
        handed_on, self._handed_on = self._handed_on, None
        if handed_on is None or not _are_those(_children(payload), handed_on):
            super().stash(future_indices, payload)  # type: ignore[misc]
            return
        tokens = payload.bonus_tokens.to(self.output_tokens_buf.dtype)
        self._tokens = _Kept(future_indices, tokens)


def make_relay(algorithm: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a relay that hands on what a step leaves, and writes what has changed.

    SGLang's gathers lengths, tokens, roots' children and hidden states of a batch before each step,
    and writes those of the step's result afterwards. Here lengths, and the tokens of a plain round,
    wait: if the next step is of the same requests, as most are, it gets them as they are, and
    nothing was written or gathered. Else they are written before that step begins. A plain round
    hands on the very children and states that it was given, which the relay holds already.

    Args:
        algorithm: Our algorithm.
        *args: What the scheduler passed, the device first.
        **kwargs: The same by name.

    Returns:
        A `FutureMap`.
    """
    from sglang.srt.managers.overlap_utils import FutureMap

    class Relay(_HandsOnLengths, _HandsOnTokens, FutureMap):  # type: ignore[misc]  # untyped base
        """Both."""

    device, *rest = args
    return Relay(device, algorithm, *rest, **kwargs)


def _is_of(draft_input: Any, rows: Any) -> bool:
    # Where requests leave or join a batch, SGLang makes other rows for it.
    return draft_input is not None and draft_input.future_indices is rows


def _children(source: Any) -> tuple[Any, ...]:
    return source.topk_p, source.topk_index, source.hidden_states


def _are_those(children: tuple[Any, ...], handed_on: tuple[Any, ...]) -> bool:
    # Of the first, None would say that nothing was ever gathered.
    same = all(one is other for one, other in zip(children, handed_on, strict=True))
    return same and children[0] is not None


def host_runs_ahead(worker: Any) -> bool:
    """Whether a step is launched before it is known what the step before has brought.

    Args:
        worker: Our worker, its attention backends made.

    Returns:
        False without overlap scheduling, and where an attention backend wants to know the lengths:
        SGLang then waits for them before every step.
    """
    if worker.server_args.disable_overlap_schedule:
        return False
    backends = worker.spec_v2_attn_backends
    return not any(getattr(each, "needs_cpu_seq_lens", True) for each in backends if each)
