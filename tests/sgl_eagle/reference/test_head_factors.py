import json
import shutil

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from sgl_eagle.reference.best_tokens import best_tokens  # noqa: E402
from sgl_eagle.reference.draft_checkpoint import load_draft, save_draft  # noqa: E402
from sgl_eagle.reference.head_checkpoint import (  # noqa: E402
    FACTORS_FILE,
    FactorsInfo,
    GlobalShortlist,
    LocalShortlist,
    activate_head,
    describe_head,
    load_factors,
    load_two_stage_head,
    save_factors,
)
from sgl_eagle.reference.head_evaluate import evaluate_routes  # noqa: E402
from sgl_eagle.reference.head_factors import (  # noqa: E402
    HeadProjection,
    factorize_head,
    relative_error,
    row_norms,
    smooth_frequencies,
)
from sgl_eagle.reference.head_routes import shortlist_routes  # noqa: E402
from sgl_eagle.reference.head_states import HeadStates  # noqa: E402
from sgl_eagle_harness.errors import CheckpointError  # noqa: E402
from sgl_eagle_kernels.lm_head import GlobalTop, LocalTop  # noqa: E402


@pytest.fixture
def weight():
    generator = torch.Generator().manual_seed(0)
    scale = torch.linspace(3, 0.1, 16)
    return torch.randn(90, 16, generator=generator) * scale


def weighted_error(weight, factors, frequencies, root):
    difference = (weight - factors.up @ factors.down).double() @ root
    return float((frequencies.sqrt()[:, None] * difference).norm())


@pytest.mark.parametrize("weigh_tokens", [False, True])
@pytest.mark.parametrize("weigh_inputs", [False, True])
def test_factors_are_nearest_in_their_norm(weight, weigh_tokens, weigh_inputs):
    generator = torch.Generator().manual_seed(1)
    frequencies = torch.ones(90, dtype=torch.float64)
    if weigh_tokens:
        frequencies = smooth_frequencies(torch.randint(0, 500, (90,), generator=generator), 1.0)
    root = torch.eye(16, dtype=torch.float64)
    if weigh_inputs:
        root = torch.randn(16, 16, generator=generator).double()
        root = root @ root.T
    factors = factorize_head(
        weight,
        5,
        frequencies=frequencies if weigh_tokens else None,
        second_moment=root @ root if weigh_inputs else None,
    ).apply(weight)
    # Eckart and Young: the rest of the spectrum is the least possible error.
    spectrum = torch.linalg.svdvals(frequencies.sqrt()[:, None] * weight.double() @ root)
    least = float(spectrum[5:].square().sum().sqrt())
    assert weighted_error(weight, factors, frequencies, root) == pytest.approx(least, rel=1e-3)


def test_leading_directions_are_the_factors_of_lower_rank(weight):
    high, low = (factorize_head(weight, rank).apply(weight) for rank in (9, 4))
    product = high.up[:, :4] @ high.down[:4]
    torch.testing.assert_close(product, low.up @ low.down, rtol=0, atol=1e-5)


def test_factors_of_full_rank_are_the_head(weight):
    factors = factorize_head(weight, 16).apply(weight)
    torch.testing.assert_close(factors.up @ factors.down, weight, rtol=0, atol=1e-5)
    assert relative_error(weight, factors) < 1e-5


def test_frequencies_are_positive_and_sum_to_one():
    frequencies = smooth_frequencies(torch.tensor([0, 3, 0, 7]), 0.5)
    assert frequencies.tolist() == pytest.approx([0.5 / 12, 3.5 / 12, 0.5 / 12, 7.5 / 12])
    with pytest.raises(ValueError, match="smoothing must be above 0, got 0"):
        smooth_frequencies(torch.zeros(3), 0)
    with pytest.raises(ValueError, match=r"rank must be in \[1, 16\], got 17"):
        factorize_head(torch.ones(20, 16), 17)


@pytest.fixture(params=["projection", "trained"])
def draft_folder(request, eagle3_pair, tmp_path):
    _, _, draft = eagle3_pair
    save_draft(draft, tmp_path, dtype=torch.float32)
    factors = factorize_head(draft.lm_head, 24)
    if request.param == "trained":
        factors = factors.apply(draft.lm_head)
    info = FactorsInfo(
        method="svd",
        rank=24,
        vocab_size=24,
        relative_error=0.5,
        row_norms=row_norms(draft.lm_head),
        num_tokens=0,
        smoothing=0,
        text="none",
    )
    save_factors(tmp_path / FACTORS_FILE, factors, info)
    return tmp_path


def load(folder, target, lm_head=None, choice=None):
    draft = load_draft(
        folder,
        embed_tokens=target.embed_tokens,
        lm_head=target.lm_head if lm_head is None else lm_head,
        num_target_layers=6,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    stored = load_two_stage_head(folder, draft.lm_head, choice)
    draft.two_stage_head = None if stored is None else stored.head
    return draft


def test_draft_uses_its_factors_only_when_its_configuration_says_so(draft_folder, eagle3_pair):
    _, target, _ = eagle3_pair
    x = torch.randn(130, 64, generator=torch.Generator().manual_seed(0))
    plain = load(draft_folder, target)
    assert plain.two_stage_head is None
    log_probs, ids = plain.best_children(x, 4)
    expected = best_tokens(plain.head(x), 4)
    assert torch.equal(log_probs, expected[0])
    assert torch.equal(ids, expected[1])
    activate_head(draft_folder, GlobalShortlist(num_candidates=12))
    fast = load(draft_folder, target)
    assert fast.two_stage_head.num_candidates == 12
    found = fast.best_children(x, 4)
    assert load(draft_folder, target, choice="full").two_stage_head is None
    # 24 of 64 directions lose little of a head of 24 rows: what is found is found exactly.
    assert torch.equal(found[1], ids)
    torch.testing.assert_close(found[0], log_probs, rtol=0, atol=0.05)


def test_head_says_what_it_is(draft_folder, eagle3_pair):
    _, target, _ = eagle3_pair
    assert describe_head(load(draft_folder, target).two_stage_head) == "full LM head"
    with pytest.raises(
        CheckpointError, match=r"--lm-head two-stage needs two_stage_head in .*json"
    ):
        load(draft_folder, target, choice="two-stage")
    activate_head(draft_folder, LocalShortlist(tile_size=4, per_tile=2))
    described = describe_head(load(draft_folder, target, choice="two-stage").two_stage_head)
    assert described == "two-stage LM head of rank 24, local 4 x 2, shuffled"


def test_reduced_vocabulary_gives_target_ids(draft_folder, eagle3_pair):
    _, target, _ = eagle3_pair
    activate_head(draft_folder, LocalShortlist(tile_size=4, per_tile=2))
    draft = load(draft_folder, target)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    ids = draft.best_children(x, 2)[1]
    draft.draft_to_target = torch.arange(24) + 100
    assert torch.equal(draft.best_children(x, 2)[1], ids + 100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / FACTORS_FILE).unlink(), "factors.safetensors: cannot be read"),
        (
            lambda f: (f / FACTORS_FILE).write_bytes((f / FACTORS_FILE).read_bytes()[:200]),
            "factors.safetensors: cannot be read, truncated",
        ),
        (
            lambda f: shutil.copy(f / "model.safetensors", f / FACTORS_FILE),
            "holds no head factors",
        ),
        (
            lambda f: edit_config(f, {"shortlist": {"kind": "global", "num_candidates": 0}}),
            "config.json: two_stage_head: num_candidates must be in",
        ),
        (
            lambda f: save_other_rank(f / FACTORS_FILE),
            r"holds .* the draft's head \[24, 64\] needs",
        ),
        (
            lambda f: edit_config(f, {"shortlist": {"kind": "best"}}),
            "config.json: two_stage_head: shortlist",
        ),
    ],
)
def test_what_cannot_be_used_is_named(draft_folder, eagle3_pair, change, message):
    activate_head(draft_folder, GlobalShortlist(num_candidates=12))
    change(draft_folder)
    with pytest.raises(CheckpointError, match=message):
        load(draft_folder, eagle3_pair[1])


def save_other_rank(path):
    info = FactorsInfo(
        method="svd",
        rank=3,
        vocab_size=24,
        relative_error=0.5,
        row_norms=(1.0,),
        num_tokens=0,
        smoothing=0,
        text="none",
    )
    save_factors(path, HeadProjection(torch.ones(64, 4), torch.ones(4, 64)), info)


def edit_config(folder, value):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"two_stage_head": value}))


def test_factors_of_another_head_are_refused(draft_folder, eagle3_pair):
    activate_head(draft_folder, GlobalShortlist(num_candidates=12))
    target = eagle3_pair[1]
    with pytest.raises(CheckpointError, match="made for another head"):
        load(draft_folder, target, target.lm_head.flip(0))
    factors, info = load_factors(draft_folder / FACTORS_FILE, target.lm_head)
    assert factors.up.shape == (24, 24)
    assert info.method == "svd"


def test_evaluation_of_a_head_of_full_rank_finds_no_loss(eagle3_pair):
    _, _, draft = eagle3_pair
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 40, 64, generator=generator)
    top1 = draft.head(inputs).argmax(-1)
    tokens = top1.clone()
    tokens[0, ::2] = (tokens[0, ::2] + 1) % 24  # every second chain fails at once
    tokens[1, 1::4] = -1  # and half of the others ends with the text
    factors = factorize_head(draft.lm_head, 24).apply(draft.lm_head)
    routes = shortlist_routes(
        draft.lm_head,
        factors,
        [24],
        [GlobalTop(num_candidates=24), LocalTop(tile_size=12, per_tile=1)],
        method="svd",
    )
    full, alone, wide, narrow = evaluate_routes(
        draft,
        HeadStates(inputs, tokens),
        routes,
        topk=4,
        on_score=lambda: None,
    )
    assert full.accept_length == pytest.approx(1 + 0.5 + 0.25)
    assert full.recall_topk == full.agreement_top1 == 1.0
    assert alone.recall_top1 <= 1.0
    assert (wide.recall_topk, wide.agreement_top1) == (1.0, 1.0)
    assert wide.accept_length == full.accept_length
    assert wide.log_prob_error < 1e-5
    assert narrow.recall_topk <= 0.5
    assert narrow.num_candidates == 2
    assert narrow.expected_recall_topk == pytest.approx(0.5, abs=0.05)
