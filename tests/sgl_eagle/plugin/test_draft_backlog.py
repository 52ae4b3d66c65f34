"""What plain rounds leave for the draft comes back in the order of its positions."""

import numpy as np
import pytest

from sgl_eagle.plugin.draft_backlog import DraftBacklog, window_size

pytestmark = pytest.mark.reference

WINDOW, NUM_FEATURES = 4, 3


def test_a_window_is_a_size_that_draft_extend_knows():
    assert window_size((1, 2, 4, 8, 16, 32)) == 16
    assert window_size((1, 5, 20)) == 20
    assert window_size((1, 4)) == 4


def make_backlog(num_rows):
    import torch

    return DraftBacklog(
        num_rows=num_rows, window=WINDOW, features=(NUM_FEATURES, torch.float32, "cpu")
    )


def keep(backlog, names, rows, lengths):
    import torch

    rows, lengths = torch.tensor(rows), torch.tensor(lengths)
    tokens = (100 * rows + lengths).int()
    features = tokens[:, None].float() + torch.arange(NUM_FEATURES) / 10
    backlog.add(names, rows=rows, lengths=lengths, tokens=tokens, features=features)


def test_each_request_gets_back_its_own_tokens_oldest_first():
    import torch

    backlog = make_backlog(6)
    assert backlog.counts(["a", "b"]).tolist() == [0, 0]
    for step in range(3):
        keep(backlog, ["a", "b"], [2, 5], [7 + step, 20 + step])
    assert backlog.counts(["a", "b"]).tolist() == [3, 3]
    assert backlog.counts(["b", "c"]).tolist() == [3, 0]
    keep(backlog, ["b", "c"], [5, 1], [23, 9])
    counts = backlog.counts(["b", "c"])
    assert counts.tolist() == [4, 1]
    starts = torch.tensor([24, 10]) - torch.from_numpy(counts)
    tokens, features = backlog.take(torch.tensor([5, 1]), starts, WINDOW)
    tokens = tokens.view(2, WINDOW)
    assert tokens[0].tolist() == [520, 521, 522, 523]
    assert tokens[1, :1].tolist() == [109]
    wanted = tokens[0].float()[:, None] + torch.arange(NUM_FEATURES) / 10
    assert np.array_equal(features.view(2, WINDOW, NUM_FEATURES)[0], wanted)
    fewer, features = backlog.take(torch.tensor([5, 1]), starts, 2)
    assert fewer.view(2, 2).tolist() == tokens[:, :2].tolist()
    assert np.array_equal(features.view(2, 2, NUM_FEATURES)[0], wanted[:2])


def test_what_the_draft_has_seen_is_not_counted_again():
    backlog = make_backlog(3)
    backlog.counts(["a", "b"])
    keep(backlog, ["a", "b"], [1, 2], [5, 6])
    backlog.clear(["a"])
    assert backlog.counts(["a", "b"]).tolist() == [0, 1]
    keep(backlog, ["a", "b"], [1, 2], [6, 7])
    assert backlog.counts(["a", "b"]).tolist() == [1, 2]
    assert backlog.counts(["b"]).tolist() == [2]
    assert not backlog.is_empty
    assert backlog.counts(["a", "b"]).tolist() == [0, 2]
    backlog.clear(["b"])
    assert backlog.is_empty
    keep(backlog, ["b", "a"], [2, 1], [8, 7])
    assert not backlog.is_empty
    backlog.counts(())
    assert backlog.is_empty


def test_places_are_told_by_the_positions_that_they_hold():
    import torch

    backlog = make_backlog(6)
    for step in range(6):
        keep(backlog, ["a", "b"], [2, 5], [7 + step, step])
        backlog.clear(["a", "b"])
    rows, lengths = torch.tensor([5, 2, 0]), torch.tensor([6, 13, 0])
    tokens, features, positions = backlog.window_before(rows, lengths)
    assert positions.sort(1).values.tolist() == [[2, 3, 4, 5], [9, 10, 11, 12], [-4, -3, -2, -1]]
    assert tokens[:2].tolist() == (100 * rows[:2, None] + positions[:2]).tolist()
    wanted = tokens[:, :, None].float() + torch.arange(NUM_FEATURES) / 10
    assert np.array_equal(features[:2], wanted[:2])
