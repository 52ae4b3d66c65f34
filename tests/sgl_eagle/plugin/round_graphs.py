"""What a round's graphs do beside the models' work, on a GPU and alone.

A round of 5 levels, topk 4 and 16 nodes verified.
"""

from typing import Any, NamedTuple

import numpy as np

BRANCHES, NUM_STEPS, NUM_DRAFT_TOKENS, PREFIX_LEN, NUM_REPLAYS = 4, 5, 16, 300, 200


def make_buffers(num_rows):
    import torch

    from sgl_eagle.plugin.draft_segment import DraftBuffers

    buffers = DraftBuffers.allocate(
        num_rows=num_rows,
        branches=BRANCHES,
        topk=BRANCHES,
        num_steps=NUM_STEPS,
        hidden=(2, torch.float32, "cuda"),
    )
    rng = np.random.default_rng(num_rows)
    buffers.seq_lens.fill_(PREFIX_LEN)
    buffers.widths.fill_(BRANCHES)
    for index in range(NUM_STEPS):
        shape = (num_rows, BRANCHES, BRANCHES)
        log_probs = -np.sort(rng.exponential(size=shape), axis=-1).astype(np.float32)
        level = buffers.layout.level(buffers.mail, index)
        level[:, 0].copy_(torch.from_numpy(rng.integers(0, 999, shape)))
        level[:, 1].copy_(torch.from_numpy(log_probs.view(np.int32)))
    return buffers


def capture(work):
    import torch

    for _ in range(3):  # kernels are compiled and loaded before anything is recorded
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay_us(graph):
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(NUM_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / NUM_REPLAYS


class RoundGraphs(NamedTuple):
    """`choosing` chooses what four draft steps expand, `writing` makes trees of the best nodes.

    `launched` is what launches write, `written` what the graphs do; they read `buffers`.
    """

    launched: tuple[Any, ...]
    written: tuple[Any, ...]
    choosing: Any
    writing: Any
    buffers: Any


def record_round(num_rows):
    import torch

    from sgl_eagle.plugin.device_trees import empty_trees, write_trees
    from sgl_eagle.plugin.draft_segment import choose_frontier
    from sgl_eagle.plugin.verify_input import MaskLayout

    buffers = make_buffers(num_rows)
    size = num_rows * NUM_DRAFT_TOKENS * (PREFIX_LEN + NUM_DRAFT_TOKENS)
    mask = torch.zeros(size, dtype=torch.uint8, device="cuda")
    layout = MaskLayout(shows_prefix=True, buffer=mask)
    trees = empty_trees(buffers, NUM_DRAFT_TOKENS, layout)

    def choose():
        buffers.paths.zero_()
        for step in range(NUM_STEPS - 1):
            choose_frontier(buffers, step)

    def write():
        write_trees(buffers, trees, shows_prefix=True)

    choose()
    write()
    launched = buffers.mail.clone(), trees.numbers.clone(), mask.clone()
    written = buffers.mail, trees.numbers, mask
    choosing, writing = capture(choose), capture(write)
    for each in (buffers.layout.frontiers(buffers.mail), trees.numbers, mask):
        each.zero_()
    return RoundGraphs(launched, written, choosing, writing, buffers)
