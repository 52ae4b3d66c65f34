"""Room for a round that begins at the end of the context, in what SGLang lays out when it starts.

Behind each text SGLang reserves twice the slots of a round, topk * num_steps or num_draft_tokens,
whichever is more: twice, because under overlap scheduling the host's lengths lag one round behind.
But the rows of its table of slots are only num_draft_tokens and four longer than the context, and
lists of slots of its attention backends end at the context. A request that came near the limit
would write into the next request's row.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


def widen_token_table() -> None:
    """Let rows of SGLang's table of slots, which it makes later, hold all that it reserves.

    For pages above 1 SGLang does so itself.
    """
    from sglang.srt.mem_cache import kv_cache_configurator as configurator

    if getattr(configurator.get_req_to_token_extra_context_len, "func", None) is not _wide_enough:
        configurator.get_req_to_token_extra_context_len = functools.partial(
            _wide_enough, configurator.get_req_to_token_extra_context_len
        )


def _wide_enough(original: Callable[..., int], *args: Any) -> int:
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    reserved: int = get_alloc_reserve_per_decode(*args)  # 0.5.17 passes the server's arguments
    return max(original(*args), reserved)


def row_overhang(runner: Any) -> int:
    """Slots of a row of SGLang's table beyond the context.

    Args:
        runner: Model runner of the target, its memory pools made.

    Returns:
        At least 0.
    """
    return int(runner.req_to_token_pool.req_to_token.shape[1] - runner.model_config.context_len)


def reserved_slots() -> int:
    """Slots that SGLang reserves behind a text before each round.

    Returns:
        Twice those of a round.
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    return int(get_alloc_reserve_per_decode())


def widen_attention(worker: Any) -> None:
    """Let all attention backends, which are made later, hold texts as long as a row.

    Args:
        worker: Our worker; SGLang makes its memory pools before its attention backends.
    """
    draft = worker.draft_worker
    runners = (worker.target_worker.model_runner, draft.draft_runner)
    _make_for_rows(draft, draft.draft_runner, "init_attention_backend")
    for runner in runners:
        for name in ("init_attention_backends", "_get_attention_backend"):
            _make_for_rows(runner, runner, name)


def _make_for_rows(owner: Any, runner: Any, name: str) -> None:
    make = getattr(owner, name)

    @functools.wraps(make)
    def make_for_rows(*args: Any, **kwargs: Any) -> Any:
        with _context_of_rows(runner):
            return make(*args, **kwargs)

    setattr(owner, name, make_for_rows)


@contextlib.contextmanager
def _context_of_rows(runner: Any) -> Iterator[None]:
    # Backends take the longest text from here, and all their sizes from that.
    config = runner.model_config
    context_len, overhang = config.context_len, row_overhang(runner)
    config.context_len = context_len + overhang
    try:
        yield
    finally:
        config.context_len = context_len
