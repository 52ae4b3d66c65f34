"""Cache slots that SGLang reserves behind each text before a decode round.

Before every round it tops all texts up to twice the slots of a round. Twice, since under overlap
scheduling the host's lengths lag one round behind, by what that round accepts: a tree's depth and
the bonus token at most, which is less than the slots of a tree. So a text that is a few slots short
of the double still has all that its round can need, and most rounds, above all plain ones, need not
allocate anything, nor write to the table of slots, nor send lengths to the device for that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any


def reserve_for_several_rounds(*, num_steps: int) -> None:
    """Let SGLang top texts up only before a round that could run out of slots.

    What it counts as free is the same either way: slots that a text is short of are counted as
    required before each round.

    Args:
        num_steps: Depth of the deepest tree; one request accepts a token more at most.
    """
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.speculative import eagle_utils

    reserved = int(get_alloc_reserve_per_decode())
    least = reserved // 2 + num_steps + 1
    if getattr(eagle_utils.eagle_prepare_for_decode, "func", None) is not _prepare_for_decode:
        eagle_utils.eagle_prepare_for_decode = functools.partial(
            _prepare_for_decode, eagle_utils.eagle_prepare_for_decode, least
        )
    ScheduleBatch._new_tokens_required_next_decode_spec_v2 = functools.partialmethod(
        _count_missing, reserved
    )


@functools.cache
def _committed_len() -> Callable[[Any], int]:
    from sglang.srt.managers.schedule_batch import ReqKvInfo

    # Up to 0.5.18 the length stands beside what is allocated.
    known = "kv_committed_len" in ReqKvInfo.__dataclass_fields__
    return attrgetter("kv.kv_committed_len" if known else "kv_committed_len")


def _num_reserved(requests: list[Any]) -> list[int]:
    # Behind each text, as far as the host knows how long it is.
    committed_len = _committed_len()
    return [request.kv.kv_allocated_len - committed_len(request) for request in requests]


def _prepare_for_decode(original: Callable[[Any], None], least: int, batch: Any) -> None:
    if min(_num_reserved(batch.reqs), default=0) < least:
        original(batch)
        return
    # What else it does.
    batch.maybe_evict_swa()
    if batch.sampling_info.penalizer_orchestrator.is_required:
        batch.cumulate_penalty_output_tokens()
    for request in batch.reqs:
        request.decode_batch_idx += 1


def _count_missing(batch: Any, reserved: int, requests: list[Any], page_size: int) -> int:
    # SGLang's own rounds each request to pages, of which ours hold one token.
    del batch, page_size
    return sum(reserved - found for found in _num_reserved(requests) if found < reserved)
