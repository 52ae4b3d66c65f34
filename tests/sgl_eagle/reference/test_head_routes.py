"""Routes to the best tokens: clusters, trimmed vocabularies, eight bits; and their scores."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from sgl_eagle.reference import head_routes  # noqa: E402
from sgl_eagle.reference.head_clusters import cluster_rows  # noqa: E402
from sgl_eagle.reference.head_evaluate import evaluate_routes  # noqa: E402
from sgl_eagle.reference.head_factors import factorize_head  # noqa: E402
from sgl_eagle.reference.head_states import HeadStates  # noqa: E402
from sgl_eagle_harness.reliability import expected_calibration_error  # noqa: E402


@pytest.fixture
def weight():
    rows = torch.randn(90, 16, generator=torch.Generator().manual_seed(0))
    return 4 * rows / rows.norm(dim=1, keepdim=True)  # each row is its own best token


def test_clusters_hold_every_token_once_and_like_with_like():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 12, generator=generator) * 10
    kinds = torch.arange(38) % 5
    groups = cluster_rows(centres[kinds] + torch.randn(38, 12, generator=generator) * 0.1, 8)
    assert groups.shape == (5, 8)
    held = groups[groups >= 0]
    assert held.sort().values.tolist() == list(range(38))
    mixed = sum(len(kinds[group[group >= 0]].unique()) > 1 for group in groups)
    assert mixed <= 2  # kinds have 7 or 8 tokens and groups 8 or 6: some must be cut


def best_of_kind(routes, word):
    return next(route for route in routes if word in route.name)


def make_routes(weight, monkeypatch, *, rank=16):
    monkeypatch.setattr(head_routes, "GROUP_SIZE", 8)
    monkeypatch.setattr(head_routes, "NUM_GROUPS", (4, 12))
    monkeypatch.setattr(head_routes, "TRIMMED_SIZES", (40,))
    counts = torch.arange(90).flip(0)  # token 0 is the most frequent
    factors = factorize_head(weight, rank).apply(weight)
    return head_routes.other_routes(weight, factors, counts, rank=rank, num_candidates=20)


def test_all_clusters_together_are_the_full_head(weight, monkeypatch):
    rows = weight[[3, 50, 89]]
    routes = make_routes(weight, monkeypatch)
    everything = best_of_kind(routes, "12 of 12 clusters of 8")
    found = everything.run(rows, 4)
    full = head_routes.full_route(weight).run(rows, 4)
    assert torch.equal(found.best.ids, full.best.ids)
    torch.testing.assert_close(found.best.log_probs, full.best.log_probs)
    some = best_of_kind(routes, "4 of 12 clusters").run(rows, 4)
    assert some.candidates.shape == (3, 32)
    assert torch.isin(some.best.ids, some.candidates).all()


def test_a_trimmed_vocabulary_knows_only_its_tokens(weight, monkeypatch):
    rows = weight[[3, 50]]
    found = best_of_kind(make_routes(weight, monkeypatch), "40 most frequent").run(rows, 4)
    assert found.best.ids[0, 0] == 3
    assert (found.best.ids < 40).all()
    assert found.candidates.shape == (2, 40)
    inside = torch.log_softmax(rows @ weight[:40].T, -1).amax(-1)
    torch.testing.assert_close(found.best.log_probs[:, 0], inside)


def test_eight_bits_choose_nearly_the_same_candidates(weight, monkeypatch):
    rows = weight[[3, 50, 89]]
    routes = make_routes(weight, monkeypatch)
    for word in ("int8 full head", "int8 factor"):
        route = best_of_kind(routes, word)
        assert route.run(rows, 4).best.ids[:, 0].tolist() == [3, 50, 89]
    rounded = head_routes.round_to_int8(weight)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((rounded - weight).abs() <= step / 2 + 1e-6).all()
    assert not torch.equal(rounded, weight)
    assert best_of_kind(routes, "int8 full head").read_bytes == 90 * 16 + 4 * 90 + 20 * 16 * 4


def test_path_confidence_is_scored_where_its_path_was_right(eagle3_pair):
    _, _, draft = eagle3_pair
    inputs = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(0))
    logits = draft.head(inputs)
    tokens = logits.argmax(-1)
    tokens[0, ::2] = (tokens[0, ::2] + 1) % 24
    tokens[1, 1::4] = -1  # the text ends: nothing is known of these drafts
    (full,) = evaluate_routes(draft, HeadStates(inputs, tokens), [], topk=4, on_score=lambda: None)
    own = torch.log_softmax(logits.double(), -1).amax(-1)
    reached = torch.ones(2, 40, dtype=torch.bool)
    reached[1] = tokens[0] == logits[0].argmax(-1)
    reached[1, 1::4] = False
    right = (tokens == logits.argmax(-1)) & reached
    wanted = expected_calibration_error(
        own.cumsum(0).exp()[reached].numpy(), right[reached].double().numpy()
    )
    assert full.path_ece == pytest.approx(wanted, abs=1e-6)
    assert full.log_prob_error < 1e-5
    assert full.read_mb == pytest.approx(24 * 64 * 4 / 1e6)
