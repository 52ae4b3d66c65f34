"""How many slots decode rounds find behind their texts; run in the fork server."""

import random
from types import SimpleNamespace

from sgl_eagle.plugin import compat_slots

NUM_STEPS, ROUND_SLOTS = 3, 12
"""Depth of the trees, and the slots of a round with topk 4."""
NUM_REQUESTS, NUM_ROUNDS = 5, 400
SHARE_OF_ENDS = 0.02
"""Rounds after which a request gives way to a new one."""


def simulate(most_accepted):
    """Decode under overlap scheduling: the host hears of a round when the next has been launched.

    Returns:
        `room`, the fewest slots that a round found behind a text; `rounds_topped_up`; and `wrong`,
        the rounds before which ours and SGLang's count of missing slots differed.
    """
    topped_up = _replace_allocation()
    _, count_usual = _install()
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative import eagle_utils

    draw = random.Random(3)
    batch = _make_batch([_make_request() for _ in range(NUM_REQUESTS)], [])
    lengths = {id(each): _get_committed(each) for each in batch.reqs}
    on_its_way, rooms, wrong = {}, [], 0
    for _ in range(NUM_ROUNDS):
        counted = ScheduleBatch._new_tokens_required_next_decode_spec_v2(batch, batch.reqs, 1)
        wrong += counted != count_usual(batch, batch.reqs, 1)
        eagle_utils.eagle_prepare_for_decode(batch)
        rooms += (each.kv.kv_allocated_len - lengths[id(each)] for each in batch.reqs)
        for each in batch.reqs:
            _commit(each, on_its_way.get(id(each), 0))
            on_its_way[id(each)] = draw.randint(1, most_accepted)
            lengths[id(each)] += on_its_way[id(each)]
        if draw.random() < SHARE_OF_ENDS:
            new = _make_request()
            lengths[id(new)] = _get_committed(new)
            batch.reqs[draw.randrange(NUM_REQUESTS)] = new
    return {"room": min(rooms), "rounds_topped_up": len(topped_up), "wrong": wrong}


def compare():
    """What SGLang's preparation and ours do to a batch that lacks no slot.

    Returns:
        For each: methods called, steps counted by each request, and fields that the batch gained.
    """
    topped_up = _replace_allocation()
    usual, _ = _install()
    from sglang.srt.speculative import eagle_utils

    done = []
    for prepare in (usual, eagle_utils.eagle_prepare_for_decode):
        calls, requests = [], [_make_request(reserved=2 * ROUND_SLOTS) for _ in range(2)]
        batch = _make_batch(requests, calls)
        before = set(vars(batch))
        prepare(batch)
        steps = [each.decode_batch_idx for each in requests]
        done.append([calls, steps, sorted(set(vars(batch)) - before)])
    assert len(topped_up) == 1, "ours is to leave it alone"
    return done


def _install():
    # SGLang's own preparation and count, which ours stand in for from now on.
    from sglang.srt.managers import schedule_batch
    from sglang.srt.mem_cache import allocation_sizing
    from sglang.srt.speculative import eagle_utils

    for module in (allocation_sizing, eagle_utils, schedule_batch):
        module.get_alloc_reserve_per_decode = lambda: 2 * ROUND_SLOTS
    prepare = eagle_utils.eagle_prepare_for_decode
    count = schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2
    compat_slots.reserve_for_several_rounds(num_steps=NUM_STEPS)
    return prepare, count


def _replace_allocation():
    # Without a pool: notes each call.
    from sglang.srt.speculative import eagle_utils

    calls = []

    def allocate(*_, reqs, nxt_kv_lens_cpu, **__):
        calls.append(len(reqs))
        for each, length in zip(reqs, nxt_kv_lens_cpu.tolist(), strict=True):
            each.kv.kv_allocated_len = length

    eagle_utils.alloc_for_spec_decode = allocate
    return calls


def _make_batch(requests, calls):
    return SimpleNamespace(
        reqs=requests,
        batch_size=lambda: len(requests),
        device="cpu",
        seq_lens_cpu=[],
        sampling_info=SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=True)),
        token_to_kv_pool_allocator=SimpleNamespace(page_size=1),
        maybe_evict_swa=lambda: calls.append("evict"),
        cumulate_penalty_output_tokens=lambda: calls.append("penalties"),
        **dict.fromkeys(("tree_cache", "req_to_token_pool", "req_pool_indices")),
    )


def _make_request(reserved=0, length=7):
    kv = SimpleNamespace(kv_allocated_len=length + reserved, kv_committed_len=length)
    return SimpleNamespace(kv=kv, kv_committed_len=length, decode_batch_idx=0)  # 0.5.17: beside it


def _get_committed(request):
    return request.kv.kv_committed_len


def _commit(request, num_tokens):
    request.kv.kv_committed_len += num_tokens
    request.kv_committed_len += num_tokens
