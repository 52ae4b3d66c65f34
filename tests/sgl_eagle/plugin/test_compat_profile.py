"""Made-up decode batches stay within what attention can read."""

from types import SimpleNamespace

import pytest
import torch

from sgl_eagle.plugin.compat_profile import fill_token_table

CONTEXT = 32
NUM_SLOTS = 40
ROOM = 8


def make_worker():
    table = torch.zeros(5, CONTEXT + ROOM + 4, dtype=torch.int32)  # as much wider as SGLang's
    model = SimpleNamespace(model_config=SimpleNamespace(context_len=CONTEXT))
    return SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=model),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool_allocator=SimpleNamespace(size=NUM_SLOTS),
        topk=2,
        speculative_num_steps=3,
        speculative_num_draft_tokens=ROOM,
    )


@pytest.mark.parametrize(
    ("wanted", "given"), [(1, 1), (CONTEXT - ROOM, CONTEXT - ROOM), (CONTEXT, CONTEXT - ROOM)]
)
def test_a_request_and_its_tree_fit_in_the_context(wanted, given):
    worker = make_worker()
    length = fill_token_table(worker, 4, wanted)
    assert length == given
    table = worker.req_to_token_pool.req_to_token
    filled = table[1:, : length + ROOM]
    assert filled.min() >= 1
    assert filled.max() <= NUM_SLOTS
    assert not table[:, CONTEXT:].any()
    assert not table[0].any()
