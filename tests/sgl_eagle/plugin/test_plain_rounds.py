"""When the draft catches up with what was decoded plainly, in which graphs, and with how much."""

import contextlib
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.reference

WINDOW, NAMES = 4, ["a", "b"]


class States:
    """Notes which graphs are used."""

    def __init__(self):
        self.now = None

    def size_for(self, num_nodes):
        return next(size for size in (1, 2, WINDOW) if size >= num_nodes)

    def use(self, size):
        self.now = f"scores {size}"


@pytest.fixture(params=[True, False], ids=["cache alone", "whole passes"])
def served(monkeypatch, request):
    """Rounds whose draft input and passes of the draft can be looked at."""
    import torch

    from sgl_eagle.plugin import compat, compat_plain
    from sgl_eagle.plugin.draft_backlog import DraftBacklog
    from sgl_eagle.plugin.plain_rounds import PlainRounds
    from sgl_eagle.plugin.round_clock import RoundClock

    features = (2, torch.float32, "cpu")
    states, passes = States(), []
    backlog = DraftBacklog(num_rows=3, window=WINDOW, features=features)

    def extend(worker, batch, *, counts, take, num_tokens):
        del worker, batch
        assert take == backlog.take
        passes.append((states.now, counts.tolist(), num_tokens))
        return "children"

    def write(batch, counts):
        del batch
        passes.append((states.now, counts.tolist(), "cache"))

    monkeypatch.setattr(compat_plain, "catch_up", extend)
    monkeypatch.setattr(compat, "draft_context", contextlib.nullcontext)
    writer = SimpleNamespace(write=write) if request.param else None
    rounds = PlainRounds(None, states, backlog, writer)
    batch, clock = SimpleNamespace(spec_info="children of before"), RoundClock()

    def decode(num_rounds, names=NAMES):
        for length in range(num_rounds):
            rounds.num_unseen(names)
            rows = torch.arange(len(names))
            backlog.add(
                names,
                rows=rows,
                lengths=rows * 0 + length,
                tokens=rows,
                features=torch.zeros(len(names), 2),
            )

    def catch_up(*, at_once):
        rounds.catch_up(batch, NAMES, rounds.num_unseen(NAMES), clock, at_once=at_once)

    window = (None, [WINDOW] * 2, "cache") if writer else (f"scores {WINDOW}", [WINDOW] * 2, WINDOW)
    return SimpleNamespace(
        batch=batch, passes=passes, decode=decode, catch_up=catch_up, window=window
    )


def test_a_full_window_goes_to_the_cache_and_leaves_the_children(served):
    for _ in range(2):
        served.decode(WINDOW - 1)
        served.catch_up(at_once=False)
        assert served.passes == []
        served.decode(1)
        served.catch_up(at_once=False)
        assert served.passes == [served.window]
        assert served.batch.spec_info == "children of before"
        served.passes.clear()


def test_whoever_drafts_gets_children_from_no_more_than_is_unseen(served):
    served.catch_up(at_once=True)
    assert served.passes == []  # nothing is
    served.decode(1)
    served.decode(1, names=["b"])
    served.catch_up(at_once=True)
    assert served.passes == [("scores 2", [0, 2], 2)]
    assert served.batch.spec_info == "children"
