"""Captured draft steps do for a padded batch what launched kernels do for the batch itself."""

import pytest
from fake_draft import (
    BRANCHES,
    Backend,
    FlashAttentionMultiStepBackend,
    install,
    make_batch,
)

pytestmark = pytest.mark.reference


@pytest.fixture
def make_worker(monkeypatch):
    pytest.importorskip("torch")
    return install(monkeypatch)


def run_round(steps, batch, choices):
    """Roots and levels, as lists."""
    import torch

    rows = steps.start(batch)
    steps.plan()
    steps.run_first(0)
    layout, mail = rows.layout, rows.mail
    found = [layout.lengths(mail).tolist(), layout.roots(mail).tolist()]
    found.append(layout.level(mail, 0)[:, :, 0].tolist())
    for step, nodes in enumerate(choices):
        rows.choice[:, 0] = torch.tensor(nodes)
        rows.choice[:, 1] = rows.choice[:, 0] // BRANCHES
        steps.run(step)
        found.append(layout.level(mail, step + 1).tolist())
    return found


@pytest.mark.parametrize("backend", [Backend, FlashAttentionMultiStepBackend])
@pytest.mark.parametrize("on_host", [True, False], ids=["lengths-on-host", "lengths-on-device"])
def test_batches_of_any_size_draft_what_they_draft_without_graphs(make_worker, on_host, backend):
    from sgl_eagle.plugin.draft_graphs import DraftGraphs
    from sgl_eagle.plugin.draft_steps import EagerSteps

    captured = make_worker(backend)
    graphs = DraftGraphs(captured, chooses=False, topk=BRANCHES, num_certain_steps=0)
    assert graphs.fits(4)
    assert not graphs.fits(5)
    # A large batch first: what it leaves in the buffers must not reach the smaller ones.
    for requests in ([3, 0, 4, 1], [2], [4, 2, 1], [0, 3]):
        choices = [
            [[0, 2, 1]] * len(requests),
            [[(3 * row + 1) % 9, 8, 0] for row in range(len(requests))],
            [[4, 4, (row + 2) % 9] for row in range(len(requests))],
        ]
        wanted = run_round(
            EagerSteps(make_worker(), chooses=False, topk=BRANCHES),
            make_batch(requests, on_host=True),
            choices,
        )
        assert run_round(graphs, make_batch(requests, on_host=on_host), choices) == wanted


def test_a_round_may_end_after_any_step(make_worker):
    from sgl_eagle.plugin.draft_graphs import DraftGraphs
    from sgl_eagle.plugin.draft_steps import EagerSteps

    graphs = DraftGraphs(make_worker(), chooses=False, topk=BRANCHES, num_certain_steps=0)
    choices = [[[0, 1, 2]] * 3, [[5, 1, 7]] * 3, [[0, 0, 8]] * 3]
    for num_steps in (3, 1, 0, 2):
        wanted = run_round(
            EagerSteps(make_worker(), chooses=False, topk=BRANCHES),
            make_batch([1, 2, 3], on_host=True),
            choices[:num_steps],
        )
        found = run_round(graphs, make_batch([1, 2, 3], on_host=True), choices[:num_steps])
        assert found == wanted
