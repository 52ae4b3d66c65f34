"""A window of each request reaches the slots of its positions, in graphs and without."""

import contextlib
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.reference

WINDOW, NUM_ROWS, LONGEST = 4, 6, 20
SIZES = [1, 3]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def rounds(monkeypatch, request):
    """A backlog, and a draft whose cache notes which token, feature and position it was given."""
    import round_graphs
    import torch

    from sgl_eagle.plugin import compat_draft_cache, compat_graphs
    from sgl_eagle.plugin.draft_backlog import DraftBacklog

    device = torch.device(request.param)
    slots = 1 + torch.randperm((NUM_ROWS - 1) * LONGEST).view(NUM_ROWS - 1, LONGEST)
    table = torch.zeros((NUM_ROWS, LONGEST), dtype=torch.int32)
    table[1:] = slots
    table = table.to(device)
    cache = torch.zeros(1 + (NUM_ROWS - 1) * LONGEST, 3, device=device)

    def write(worker, *, tokens, features, positions, slots):
        del worker
        cache[slots] = torch.stack([tokens, features[:, 0], positions], 1).float()
        return True

    def capture(segment, stream):
        del stream
        if device.type == "cuda":
            return round_graphs.capture(segment)
        segment()
        return SimpleNamespace(replay=segment)

    monkeypatch.setattr(compat_draft_cache, "has_one_attention", lambda _: True)
    monkeypatch.setattr(compat_draft_cache, "write_cache", write)
    monkeypatch.setattr(compat_graphs, "capture_graph", capture)
    monkeypatch.setattr(compat_graphs, "capturing", contextlib.nullcontext)
    monkeypatch.setattr(compat_graphs, "captured_batch_sizes", lambda _: SIZES)
    backlog = DraftBacklog(num_rows=NUM_ROWS, window=WINDOW, features=(1, torch.float32, device))
    model = SimpleNamespace()
    worker = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        draft_runner=SimpleNamespace(model=model),
    )

    def make_batch(rows, lengths):
        return SimpleNamespace(
            req_pool_indices=torch.tensor(rows, device=device),
            seq_lens=torch.tensor(lengths, device=device),
        )

    def decode(rows, lengths):
        rows, lengths = torch.tensor(rows, device=device), torch.tensor(lengths, device=device)
        tokens = 100 * rows + lengths
        features = tokens[:, None] / 8
        names = [str(row) for row in rows.tolist()]
        backlog.add(names, rows=rows, lengths=lengths, tokens=tokens, features=features)

    return SimpleNamespace(
        backlog=backlog,
        worker=worker,
        cache=cache,
        table=table,
        decode=decode,
        make_batch=make_batch,
    )


def written(rounds, row):
    """Positions of a request whose slots hold what they must; all others must be as they were."""
    positions = []
    for position, slot in enumerate(rounds.table[row].tolist()):
        entry = rounds.cache[slot].tolist()
        token = 100 * row + position
        if entry == [token, token / 8, position]:
            positions.append(position)
        else:
            assert entry == [0, 0, 0]
    return positions


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("rows", [[3], [4, 2], [1, 5, 3], [5, 4, 3, 2, 1]], ids=str)
def test_what_is_unseen_and_nothing_else_is_written(rounds, rows, capture):
    import torch

    from sgl_eagle.plugin.cache_writer import make_cache_writer

    writer = make_cache_writer(rounds.worker, rounds.backlog, capture=capture)
    starts = [3 * row for row in rows]
    for step in range(WINDOW + 1):  # the oldest token has left its place by the end
        rounds.decode(rows, [start + step for start in starts])
    lengths = [start + WINDOW + 1 for start in starts]
    counts = [WINDOW - index % 3 for index in range(len(rows))]
    writer.write(rounds.make_batch(rows, lengths), torch.tensor(counts))
    for row, length, count in zip(rows, lengths, counts, strict=True):
        assert written(rounds, row) == list(range(length - count, length))
    for row in set(range(1, NUM_ROWS)) - set(rows):
        assert written(rounds, row) == []


def test_a_smaller_batch_does_not_write_for_the_one_before(rounds):
    import torch

    from sgl_eagle.plugin.cache_writer import make_cache_writer

    writer = make_cache_writer(rounds.worker, rounds.backlog, capture=True)
    for rows in ([1, 2, 3], [4, 5]):
        rounds.decode(rows, [7] * len(rows))
        rounds.cache.zero_()
        batch = rounds.make_batch(rows, [8] * len(rows))
        writer.write(batch, torch.ones(len(rows), dtype=torch.int64))
        assert [row for row in range(1, NUM_ROWS) if written(rounds, row)] == rows


@pytest.mark.parametrize("reason", ["several layers", "does not end"])
def test_other_drafts_catch_up_by_whole_passes_and_the_log_says_so(
    rounds, reason, monkeypatch, caplog
):
    from sgl_eagle.plugin import compat_draft_cache
    from sgl_eagle.plugin.cache_writer import make_cache_writer

    if reason == "several layers":
        monkeypatch.setattr(compat_draft_cache, "has_one_attention", lambda _: False)
    else:
        monkeypatch.setattr(compat_draft_cache, "write_cache", lambda *_, **__: False)
    caplog.set_level("INFO")
    assert make_cache_writer(rounds.worker, rounds.backlog, capture=True) is None
    assert "whole passes of SimpleNamespace" in caplog.text
