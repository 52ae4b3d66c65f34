"""What is read from SGLang's requests and batches."""

from types import SimpleNamespace

import torch
from fake_requests import FakeRequest

from sgl_eagle.plugin.compat_requests import cached_lengths

CONTEXT = 64


def test_no_request_is_longer_than_the_context_for_which_there_are_costs():
    requests = [FakeRequest("a"), FakeRequest("b", output_ids=[])]
    batch = SimpleNamespace(
        reqs=requests,
        seq_lens_cpu=torch.tensor([CONTEXT + 3, 7]),
        model_config=SimpleNamespace(context_len=CONTEXT),
    )
    assert cached_lengths(batch) == [CONTEXT, 7]
    batch.seq_lens_cpu = None  # the device has them
    assert cached_lengths(batch) == [3, 2]
