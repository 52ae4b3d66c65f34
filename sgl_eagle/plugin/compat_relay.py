"""SGLang's relay between the steps of a batch under overlap scheduling."""

from __future__ import annotations

from typing import Any, NamedTuple


class _Kept(NamedTuple):
    # A step's tokens, of rows of the relay that have not been told of them.
    rows: Any
    tokens: Any


def make_relay(algorithm: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a relay that hands on what a step leaves, and writes what has changed.

    SGLang's gathers tokens, roots' children and hidden states of a batch before each step, and
    writes those of the step's result afterwards. A plain round hands on the very children and
    states that it was given, which the relay holds already. Its tokens wait: if the next step is of
    the same requests, as most are, it gets them as they are, and nothing was written or gathered.
    Else they are written before that step begins.

    Args:
        algorithm: Our algorithm.
        *args: What the scheduler passed, the device first.
        **kwargs: The same by name.

    Returns:
        A `FutureMap`.
    """
    from sglang.srt.managers.overlap_utils import FutureMap

    class Relay(FutureMap):  # type: ignore[misc]  # untyped base
        _handed_on: tuple[Any, ...] | None = None  # children and states of the batch that runs
        _kept: _Kept | None = None

        def _resolve_spec_extras(self, batch: Any) -> None:
            kept, self._kept = self._kept, None
            draft_input = batch.spec_info
            if kept is not None and _is_of(draft_input, kept.rows):
                draft_input.bonus_tokens = kept.tokens
            else:
                if kept is not None:
                    self.output_tokens_buf[kept.rows] = kept.tokens
                super()._resolve_spec_extras(batch)
            self._handed_on = None if draft_input is None else _children(draft_input)

        def stash(self, future_indices: Any, payload: Any) -> None:
            handed_on, self._handed_on = self._handed_on, None
            if handed_on is None or not _are_those(_children(payload), handed_on):
                super().stash(future_indices, payload)
                return
            tokens = payload.bonus_tokens.to(self.output_tokens_buf.dtype)
            self._kept = _Kept(future_indices, tokens)

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
