"""Drawing of tokens: the filters, and the distribution that is left."""

import numpy as np
import pytest
from scipy import stats

pytestmark = pytest.mark.reference

PROBS = (0.4, 0.3, 0.2, 0.06, 0.04)


def draw(num_rows, *, temperature=1.0, top_k=5, top_p=1.0, min_p=0.0, probs=PROBS):
    import torch

    from sgl_eagle.plugin.tree_sampling import draw_tokens

    torch.manual_seed(0)
    return draw_tokens(
        torch.tensor(probs).log().repeat(num_rows, 1),
        temperatures=torch.full((num_rows,), temperature),
        top_ks=torch.full((num_rows,), top_k),
        top_ps=torch.full((num_rows,), top_p),
        min_ps=torch.full((num_rows,), min_p),
    ).numpy()


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, (0, 1, 2, 3, 4)),
        ({"top_k": 2}, (0, 1)),
        ({"top_k": 1}, (0,)),
        # The token that crosses p stays.
        ({"top_p": 0.5}, (0, 1)),
        ({"top_p": 1e-6}, (0,)),
        ({"min_p": 0.25}, (0, 1, 2)),
        ({"top_k": 3, "min_p": 0.6}, (0, 1)),
        ({"temperature": 2.0, "top_k": 3}, (0, 1, 2)),
    ],
    ids=str,
)
def test_what_the_filters_leave_is_drawn_in_proportion(filters, kept):
    num_rows = 20_000
    temperature = filters.get("temperature", 1.0)
    weights = np.array([PROBS[token] for token in kept]) ** (1 / temperature)
    counts = np.bincount(draw(num_rows, **filters), minlength=len(PROBS))
    assert counts.sum() == counts[list(kept)].sum() == num_rows
    if len(kept) > 1:
        expected = num_rows * weights / weights.sum()
        assert stats.chisquare(counts[list(kept)], expected).pvalue > 1e-4


def test_rows_have_their_own_filters():
    import torch

    from sgl_eagle.plugin.tree_sampling import draw_tokens

    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(2, 1)
    drawn = draw_tokens(
        logits,
        temperatures=torch.tensor([1.0, 1e-4]),
        top_ks=torch.tensor([1, 3]),
        top_ps=torch.ones(2),
        min_ps=torch.zeros(2),
    )
    assert drawn.tolist() == [2, 2]
