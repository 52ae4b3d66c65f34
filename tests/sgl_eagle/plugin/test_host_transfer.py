"""Arrays arrive unchanged, whatever their shapes and dtypes."""

import numpy as np
import pytest

pytestmark = pytest.mark.reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_of_several_dtypes_travel_in_one_piece(device):
    from sgl_eagle.plugin.host_transfer import HostTransfer

    transfer = HostTransfer(device)
    draw = np.random.default_rng(0)
    arrays = [
        draw.integers(0, 9, (3, 5)),
        draw.random((2, 1, 7)) < 0.5,
        draw.random(11).astype(np.float32),
        np.empty((0, 4), np.int64),
    ]
    sent = transfer.send(arrays)
    for array, tensor in zip(arrays, sent, strict=True):
        assert tensor.device.type == device
        fetched = transfer.fetch(tensor)
        assert fetched.dtype == array.dtype
        assert fetched.tolist() == array.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_fetched_belongs_to_the_caller(device):
    import torch

    from sgl_eagle.plugin.host_transfer import HostTransfer

    transfer = HostTransfer(device)
    tensor = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    first = transfer.fetch(tensor)
    tensor.add_(10)
    second = transfer.fetch(tensor)
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second.tolist() == [[10, 11, 12], [13, 14, 15]]


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_sent_stays_when_more_is_sent(device):
    from sgl_eagle.plugin.host_transfer import HostTransfer

    transfer = HostTransfer(device)
    first = transfer.send([np.arange(4)])[0]
    transfer.fetch(first)
    transfer.send([np.zeros(400, np.int64)])
    assert transfer.fetch(first).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("device", DEVICES)
def test_an_array_can_be_sent_to_its_place(device):
    import torch

    from sgl_eagle.plugin.host_transfer import HostTransfer

    transfer = HostTransfer(device)
    target = torch.zeros((4, 3), dtype=torch.int64, device=device)
    transfer.send_into(target[1:3], np.arange(6).reshape(2, 3))
    assert transfer.fetch(target).tolist() == [[0] * 3, [0, 1, 2], [3, 4, 5], [0] * 3]
