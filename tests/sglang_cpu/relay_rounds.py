"""Steps of a batch through SGLang's relay and ours; runs in the fork server."""

from types import SimpleNamespace

import torch

NUM_ROWS, TOPK, HIDDEN = 6, 2, 3
STEPS = [([1, 2, 3], True), ([1, 2, 3], False), ([3, 1], False), ([3, 1], True), ([2, 3, 1], False)]
"""Rows of the batch, and whether the step leaves other children."""


def relay(ours):
    """What each step gathers, and what the relay is told to write in steps that change nothing."""
    from sglang.srt.managers import overlap_utils
    from sglang.srt.speculative import spec_utils

    from sgl_eagle.plugin.compat_relay import make_relay

    # A kernel, and what no tensor of a CPU knows.
    overlap_utils.gather_spec_extras = lambda rows, *buffers: [buffer[rows] for buffer in buffers]
    torch.Tensor.record_stream = lambda *_: None
    spec_utils.spec_need_hidden_states = lambda: True
    algorithm = SimpleNamespace(
        is_ngram=lambda: False, is_none=lambda: False, is_some=lambda: True, need_topk=lambda: True
    )
    pool = SimpleNamespace(req_to_token=torch.zeros(NUM_ROWS, 4))
    if ours:
        relayed = make_relay(algorithm, "cpu", pool)
    else:
        relayed = overlap_utils.FutureMap("cpu", algorithm, pool)
    draw = torch.Generator().manual_seed(3)
    gathered = []
    for step, (rows, is_new) in enumerate(STEPS):
        indices = torch.tensor(rows)
        children = SimpleNamespace(
            future_indices=indices, future_dsa_topk_indices_available=False, draft_probs=None
        )
        if step:
            relayed._resolve_spec_extras(SimpleNamespace(spec_info=children))
            names = ("topk_p", "topk_index", "hidden_states", "bonus_tokens")
            gathered.append([getattr(children, name).tolist() for name in names])
        if is_new:
            children.topk_p = torch.rand(len(rows), TOPK, generator=draw)
            children.topk_index = torch.randint(99, (len(rows), TOPK), generator=draw)
            children.hidden_states = torch.rand(len(rows), HIDDEN, generator=draw)
        else:  # what is written would show
            children.topk_p.add_(1)
        payload = overlap_utils.RelayPayload(
            bonus_tokens=torch.randint(99, (len(rows),), generator=draw),
            topk_p=children.topk_p,
            topk_index=children.topk_index,
            hidden_states=children.hidden_states,
        )
        relayed.stash(indices, payload)
    return gathered
