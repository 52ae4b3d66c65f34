"""Trees that the device lays out are those that the host would have sent, to the last number."""

import numpy as np
import pytest
from round_graphs import record_round, replay_us

from sgl_eagle.plugin.foreseen_trees import assemble_trees
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.types import BatchContext, TreeLimits

pytest.importorskip("torch", reason="needs torch")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_ROWS, BRANCHES, NUM_STEPS = 5, 3, 4


def make_buffers(seed, device, topk):
    """Mail of a round whose steps chose as the device chooses; few probabilities, some of none."""
    import torch

    from sgl_eagle.plugin.draft_segment import DraftBuffers, choose_frontier

    rng = np.random.default_rng(seed)
    buffers = DraftBuffers.allocate(
        num_rows=NUM_ROWS,
        branches=BRANCHES,
        topk=topk,
        num_steps=NUM_STEPS,
        hidden=(2, torch.float32, device),
    )
    layout, mail = buffers.layout, buffers.mail
    lengths = rng.integers(1, 20, NUM_ROWS)
    buffers.seq_lens.copy_(torch.from_numpy(lengths))
    layout.lengths(mail).copy_(buffers.seq_lens)
    layout.roots(mail).copy_(torch.from_numpy(rng.integers(0, 99, NUM_ROWS)))
    buffers.widths.fill_(BRANCHES)
    for index in range(NUM_STEPS):
        shape = (NUM_ROWS, BRANCHES, BRANCHES)
        log_probs = -np.sort(rng.integers(0, 4, shape), axis=-1).astype(np.float32) / 3
        # Of the last child that counts, and of the last of all, which a narrow policy never sees.
        for rank in {topk, BRANCHES}:
            log_probs[rng.random(shape[:2]) < 0.15, rank - 1] = rng.choice([-np.inf, np.nan])
        level = layout.level(mail, index)
        level[:, 0].copy_(torch.from_numpy(rng.integers(0, 99, shape)))
        level[:, 1].copy_(torch.from_numpy(log_probs.view(np.int32)))
        if index + 1 < NUM_STEPS:
            choose_frontier(buffers, index)
    return buffers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shows_prefix", [True, False], ids=["over-prefix", "over-tree"])
@pytest.mark.parametrize(
    ("topk", "num_draft_tokens"), [(3, 2), (3, 8), (3, 25), (2, 2), (2, 14), (1, 5)]
)
def test_the_device_writes_what_the_host_would_send(device, shows_prefix, topk, num_draft_tokens):
    import torch

    from sgl_eagle.plugin.device_trees import write_trees
    from sgl_eagle.plugin.host_transfer import HostTransfer
    from sgl_eagle.plugin.verify_input import MaskLayout, TreeTensors, pack_trees, send_trees

    limits = TreeLimits(num_steps=NUM_STEPS, topk=topk, num_draft_tokens=num_draft_tokens)
    policy = Eagle2Policy(limits=limits)
    sizes = set()
    for seed in range(20):
        buffers = make_buffers(seed, device, topk)
        mail = buffers.mail.cpu().numpy()
        context_len = buffers.layout.lengths(mail).astype(np.int64)
        batch = BatchContext(
            batch_size=NUM_ROWS, context_len=context_len, num_pending=np.ones(NUM_ROWS, np.int64)
        )
        everyone = np.ones(NUM_ROWS, np.bool_)
        trees = assemble_trees(buffers.layout, mail, NUM_STEPS - 1, topk=topk, speculating=everyone)
        packed = pack_trees(trees, policy.select_verify(trees, batch), num_draft_tokens)
        sizes |= set(packed.num_draft_tokens.tolist())
        size = NUM_ROWS * num_draft_tokens * (20 + num_draft_tokens)
        wanted = send_trees(
            packed,
            HostTransfer(device, 1),
            root_tokens=buffers.layout.roots(mail).astype(np.int64),
            context_len=context_len,
            layout=MaskLayout(
                shows_prefix=shows_prefix,
                buffer=torch.zeros(size, dtype=torch.uint8, device=device),
            ),
        )
        shape = (5, NUM_ROWS, num_draft_tokens)
        found = TreeTensors(
            numbers=torch.full(shape, 7, device=device),
            mask=torch.zeros(size, dtype=torch.uint8, device=device),
        )
        write_trees(buffers, found, shows_prefix=shows_prefix)
        assert found.numbers.tolist() == wanted.numbers.tolist()
        assert found.mask[: len(wanted.mask)].tolist() == wanted.mask.tolist()
    assert num_draft_tokens in sizes
    assert len(sizes) > 1 or num_draft_tokens == 2


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 64, 128])
def test_graphs_write_what_launches_write_and_say_how_long_they_take(num_rows, capsys):
    import torch

    graphs = record_round(num_rows)
    parts = list(zip(graphs.launched, graphs.written, strict=True))
    assert not any(torch.equal(launched, written) for launched, written in parts)
    graphs.choosing.replay()
    graphs.writing.replay()
    assert all(torch.equal(launched, written) for launched, written in parts)
    with capsys.disabled():
        print(  # noqa: T201
            f"\nbatch {num_rows}: choosing frontiers {replay_us(graphs.choosing):.0f} us, "
            f"making trees {replay_us(graphs.writing):.0f} us of the device a round"
        )
