"""SGLang's relay between the steps of a batch under overlap scheduling."""

from __future__ import annotations

from typing import Any


def make_relay(algorithm: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a relay that writes back what has changed.

    SGLang's gathers the roots' children and hidden states of a batch before each step, and writes
    those of the step's result afterwards. A plain round hands on the very tensors that it was
    given: the relay holds them already, and writing them takes three launches a round.

    Args:
        algorithm: Our algorithm.
        *args: What the scheduler passed, the device first.
        **kwargs: The same by name.

    Returns:
        A `FutureMap`.
    """
    from sglang.srt.managers.overlap_utils import FutureMap

    class Relay(FutureMap):  # type: ignore[misc]  # untyped base
        _gathered: tuple[Any, ...] | None = None

        def _resolve_spec_extras(self, batch: Any) -> None:
            super()._resolve_spec_extras(batch)
            self._gathered = None if batch.spec_info is None else _children(batch.spec_info)

        def stash(self, future_indices: Any, payload: Any) -> None:
            gathered, self._gathered = self._gathered, None
            if gathered is None or not _are_those(_children(payload), gathered):
                super().stash(future_indices, payload)
                return
            tokens = self.output_tokens_buf
            tokens[future_indices] = payload.bonus_tokens.to(tokens.dtype)

    device, *rest = args
    return Relay(device, algorithm, *rest, **kwargs)


def _children(source: Any) -> tuple[Any, ...]:
    return source.topk_p, source.topk_index, source.hidden_states


def _are_those(children: tuple[Any, ...], gathered: tuple[Any, ...]) -> bool:
    # Of the first, None would say that nothing was ever gathered.
    same = all(one is other for one, other in zip(children, gathered, strict=True))
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
