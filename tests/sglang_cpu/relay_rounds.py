"""Steps of batches through SGLang's relay and ours; run in the fork server."""

from types import SimpleNamespace

import torch

NUM_ROWS, TOPK, HIDDEN = 7, 2, 3
STEPS = (
    ([1, 2, 3], False),
    ([1, 2, 3], True),
    ([1, 2, 3], True),
    ([1, 2, 3], True),
    ([3, 1], True),
    ([3, 1], False),
    ([2, 3, 1], True),
    ([4], False),
    ([2, 3, 1, 4], True),
    ([2, 3, 1, 4], True),
)
"""Rows of the batch, and whether the step leaves the children that it was given, as a plain round
does. Rows that are new begin as a prefill."""
FIELDS = ("topk_p", "topk_index", "hidden_states", "bonus_tokens")


class _Watched(torch.Tensor):
    """A buffer that tells who writes to it."""

    def __setitem__(self, rows, values):
        self.events.append(self.label)
        super().__setitem__(rows, values)


def relay(ours):
    """Send all steps through.

    Returns:
        For each step what it was given, None for a prefill; and for each whether the relay was
        read ("gathers"), and which parts of it were written.
    """
    events = []
    relayed = _make_relay(ours, events)
    draw = torch.Generator().manual_seed(3)
    given, noted, known, running = [], [], set(), None
    for rows, leaves_children in STEPS:
        if running is None or running.future_indices.tolist() != rows:
            running = SimpleNamespace(
                future_indices=torch.tensor(rows),  # new wherever requests leave or join
                future_dsa_topk_indices_available=False,
                draft_probs=None,
                **dict.fromkeys(FIELDS),
            )
        is_prefill = not known & set(rows)
        known |= set(rows)
        batch = SimpleNamespace(spec_info=None if is_prefill else running)
        relayed.resolve_seq_lens_cpu(batch)
        relayed._resolve_spec_extras(batch)
        given.append(
            None
            if is_prefill
            else [batch.seq_lens.tolist(), *(getattr(running, name).tolist() for name in FIELDS)]
        )
        relayed.publish(running.future_indices, torch.randint(99, (len(rows),), generator=draw))
        if not leaves_children:
            running.topk_p = torch.rand(len(rows), TOPK, generator=draw)
            running.topk_index = torch.randint(99, (len(rows), TOPK), generator=draw)
            running.hidden_states = torch.rand(len(rows), HIDDEN, generator=draw)
        running.bonus_tokens = torch.randint(99, (len(rows),), generator=draw)
        relayed.stash(running.future_indices, _payload(running))
        _watch(relayed, events)
        noted.append(events.copy())
        events.clear()
    return given, noted


def _make_relay(ours, events):
    from sglang.srt.managers import overlap_utils
    from sglang.srt.speculative import spec_utils

    from sgl_eagle.plugin.compat_relay import make_relay

    def gather(rows, *buffers):
        events.append("gathers")
        return [buffer.as_subclass(torch.Tensor)[rows] for buffer in buffers]

    # A kernel, and what no tensor of a CPU knows.
    overlap_utils.gather_spec_extras = gather
    torch.Tensor.record_stream = lambda *_: None
    spec_utils.spec_need_hidden_states = lambda: True
    algorithm = SimpleNamespace(
        is_ngram=lambda: False, is_none=lambda: False, is_some=lambda: True, need_topk=lambda: True
    )
    pool = SimpleNamespace(req_to_token=torch.zeros(NUM_ROWS, 4))
    if ours:
        return make_relay(algorithm, "cpu", pool, needs_cpu_seq_lens=False)
    return overlap_utils.FutureMap("cpu", algorithm, pool, needs_cpu_seq_lens=False)


def _payload(step):
    from sglang.srt.managers.overlap_utils import RelayPayload

    return RelayPayload(**{name: getattr(step, name) for name in FIELDS})


def _watch(relayed, events):
    # SGLang makes most buffers at the first step.
    for name in ("new_seq_lens", "output_tokens", "topk_p", "topk_index", "hidden_states"):
        buffer = getattr(relayed, f"{name}_buf")
        if not isinstance(buffer, _Watched):
            watched = buffer.as_subclass(_Watched)
            watched.events, watched.label = events, name
            setattr(relayed, f"{name}_buf", watched)
