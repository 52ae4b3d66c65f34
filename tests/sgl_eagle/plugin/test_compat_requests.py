"""What is read from SGLang's requests and batches."""

from types import SimpleNamespace

import pytest
import torch
from fake_requests import FakeRequest

from sgl_eagle.plugin.compat_requests import cached_lengths, is_on_host

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


@pytest.mark.gpu
def test_a_result_is_on_the_host_once_the_device_is_done_and_asking_does_not_wait():
    result = SimpleNamespace(copy_done=torch.cuda.Event())
    torch.cuda._sleep(10**9)  # cycles: about half a second
    result.copy_done.record()
    assert not is_on_host(result)
    torch.cuda.synchronize()
    assert is_on_host(result)


def test_a_result_that_nobody_has_asked_for_is_not_on_the_host():
    assert not is_on_host(SimpleNamespace(copy_done=None))
