"""SGLang symbols that made-up decode batches need."""

from __future__ import annotations

from array import array
from typing import Any

import torch


def make_decode_batches(
    worker: Any, num_batches: int, *, batch_size: int, context_len: int
) -> list[Any]:
    """Batches as the scheduler hands them to a speculative worker, of requests that do not exist.

    Their rows of the token table point at slots of the pool, over and over if it is small: what a
    pass costs does not depend on what it reads. Nothing is allocated.

    Args:
        worker: Our worker, serving nobody.
        num_batches: One for each round, all of the same requests.
        batch_size: Requests, at most as many as the server runs.
        context_len: Cached tokens of each; cut to what leaves room for a tree.

    Returns:
        `ScheduleBatch` objects in decode mode.
    """
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    requests = [
        Req(
            rid=f"sgl-eagle-profile-{index}",
            origin_input_text="",
            origin_input_ids=array("q", [0]),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
        )
        for index in range(batch_size)
    ]
    length = fill_token_table(worker, batch_size, context_len)
    return [_make_decode_batch(worker, requests, length) for _ in range(num_batches)]


def _make_decode_batch(worker: Any, requests: list[Any], length: int) -> Any:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    runner, batch_size = worker.target_worker.model_runner, len(requests)
    batch = ScheduleBatch.init_new(
        reqs=requests,
        req_to_token_pool=worker.req_to_token_pool,
        token_to_kv_pool_allocator=worker.token_to_kv_pool_allocator,
        tree_cache=None,
        model_config=runner.model_config,
        enable_overlap=False,
        spec_algorithm=runner.spec_algorithm,
    )
    device = worker.device
    batch.forward_mode = ForwardMode.DECODE
    batch.seq_lens_cpu = torch.full((batch_size,), length, dtype=torch.int64)
    batch.seq_lens = batch.seq_lens_cpu.to(device)
    batch.seq_lens_sum = batch_size * length
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.req_pool_indices = torch.arange(1, batch_size + 1, device=device)
    batch.req_pool_indices_cpu = torch.arange(1, batch_size + 1)
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(
        batch, runner.model_config.vocab_size
    )
    batch.spec_info = _draft_input(worker, batch_size)
    return batch


def forget_decode_batches(worker: Any) -> None:
    """Empty the rows of the token table that made-up batches have filled.

    Args:
        worker: Our worker, serving nobody.
    """
    worker.req_to_token_pool.req_to_token.zero_()


def fill_token_table(worker: Any, batch_size: int, context_len: int) -> int:
    """Give made-up requests slots, of their cached tokens and of a tree.

    Args:
        worker: Our worker, serving nobody.
        batch_size: Requests, in rows 1 and up.
        context_len: Cached tokens wanted of each.

    Returns:
        Cached tokens of each: with a tree, at most the context, where positions end.
    """
    table = worker.req_to_token_pool.req_to_token
    longest = int(worker.target_worker.model_runner.model_config.context_len)
    num_slots = int(worker.token_to_kv_pool_allocator.size)
    branches = int(worker.topk) * int(worker.speculative_num_steps)
    room = max(branches, int(worker.speculative_num_draft_tokens))
    length = max(1, min(context_len, longest - room))
    filled = length + room
    columns = torch.arange(filled, device=table.device, dtype=table.dtype)
    for row in range(batch_size):  # all at once would take as much memory again as the table
        table[row + 1, :filled] = (columns + row * filled % num_slots) % num_slots + 1
    return length


def _draft_input(worker: Any, batch_size: int) -> Any:
    from sglang.srt.speculative.eagle_info import EagleDraftInput
    from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec

    topk, device = int(worker.topk), worker.device
    size, dtype = get_draft_recurrent_hidden_state_spec(worker.draft_worker.draft_runner)
    children = torch.arange(topk, device=device).expand(batch_size, topk)
    return EagleDraftInput(
        topk_p=0.5 ** (1.0 + children),
        topk_index=children.to(torch.int64),
        hidden_states=torch.zeros((batch_size, size), dtype=dtype, device=device),
        bonus_tokens=torch.zeros(batch_size, dtype=torch.int32, device=device),
        num_tokens_per_req=1,
        num_tokens_for_logprob_per_req=1,
    )
