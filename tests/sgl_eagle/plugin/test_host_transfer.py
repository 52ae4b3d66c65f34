"""Arrays arrive unchanged, whatever their shapes and dtypes, in whatever order they are taken."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def fetch(transfer, tensor, slot=0):
    transfer.begin(slot, tensor)
    return transfer.wait(slot)


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_of_several_dtypes_travel_in_one_piece(device):
    from sgl_eagle.plugin.host_transfer import HostTransfer

    transfer = HostTransfer(device, 1)
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
        fetched = fetch(transfer, tensor)
        assert fetched.dtype == array.dtype
        assert fetched.tolist() == array.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_slots_keep_what_the_device_held_when_their_copies_began(device):
    import torch

    from sgl_eagle.plugin.host_transfer import HostTransfer

    transfer = HostTransfer(device, 3)
    tensor = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    for slot in range(3):
        transfer.begin(slot, tensor)
        tensor.add_(10)
    assert transfer.wait(2).tolist() == [[20, 21, 22], [23, 24, 25]]
    assert transfer.wait(0).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert transfer.wait(1).tolist() == [[10, 11, 12], [13, 14, 15]]


@pytest.mark.parametrize("device", DEVICES)
def test_a_slot_takes_batches_of_any_size(device):
    import torch

    from sgl_eagle.plugin.host_transfer import HostTransfer

    transfer = HostTransfer(device, 2)
    for num_rows in (2, 2, 1, 5, 2):
        tensor = torch.arange(3 * num_rows, dtype=torch.int32, device=device).view(num_rows, 3)
        transfer.post(0, tensor)
        transfer.begin(1, tensor)
        transfer.wait(1)  # so that what was posted before has arrived too
        assert transfer.read(0).tolist() == tensor.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_fetched_belongs_to_the_caller(device):
    import torch

    from sgl_eagle.plugin.host_transfer import HostTransfer

    transfer = HostTransfer(device, 1)
    tensor = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    first = fetch(transfer, tensor)
    tensor.add_(10)
    second = fetch(transfer, tensor)
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second.tolist() == [[10, 11, 12], [13, 14, 15]]


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_sent_stays_when_more_is_sent(device):
    from sgl_eagle.plugin.host_transfer import HostTransfer

    transfer = HostTransfer(device, 1)
    first = transfer.send([np.arange(4)])[0]
    fetch(transfer, first)
    transfer.send([np.zeros(400, np.int64)])
    assert fetch(transfer, first).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_can_be_sent_to_their_places_from_slots_of_their_own(device):
    import torch

    from sgl_eagle.plugin.host_transfer import HostTransfer

    transfer = HostTransfer(device, 2)
    target = torch.zeros((4, 3), dtype=torch.int64, device=device)
    transfer.send_into(0, target[1:3], np.arange(6).reshape(2, 3))
    transfer.send_into(1, target[3:], np.full((1, 3), 7))
    assert fetch(transfer, target).tolist() == [[0] * 3, [0, 1, 2], [3, 4, 5], [7] * 3]
