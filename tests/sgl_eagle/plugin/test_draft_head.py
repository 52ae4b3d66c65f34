"""The two-stage head in the place of the draft model's own."""

import json
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.reference

VOCABULARY, HIDDEN, RANK, TOPK = 41, 12, 6, 3


@pytest.fixture
def draft(tmp_path):
    """A draft worker of SGLang's shape whose checkpoint has factors."""
    torch = pytest.importorskip("torch")
    from sgl_eagle.reference.head_checkpoint import (
        FACTORS_FILE,
        FactorsInfo,
        GlobalShortlist,
        activate_head,
        save_factors,
    )
    from sgl_eagle.reference.head_factors import factorize_head, row_norms

    weight = torch.randn(VOCABULARY + 7, HIDDEN, generator=torch.Generator().manual_seed(0))
    head = weight[:VOCABULARY]
    info = FactorsInfo(
        method="svd",
        rank=RANK,
        vocab_size=VOCABULARY,
        relative_error=0,
        row_norms=row_norms(head),
        num_tokens=0,
        smoothing=0,
        text="none",
    )
    save_factors(tmp_path / FACTORS_FILE, factorize_head(head, RANK), info)
    (tmp_path / "config.json").write_text("{}")
    activate_head(tmp_path, GlobalShortlist(num_candidates=9))
    model = SimpleNamespace(
        lm_head=SimpleNamespace(weight=weight),  # the last rows are SGLang's padding
        config=SimpleNamespace(draft_vocab_size=VOCABULARY, vocab_size=99),
        logits_processor=SimpleNamespace(_get_logits=None),
    )
    worker = SimpleNamespace(topk=TOPK, draft_runner=SimpleNamespace(model=model))
    return SimpleNamespace(worker=worker, model=model, head=head, folder=tmp_path)


def install(draft, choice=None, tensor_parallel_size=1):
    from sgl_eagle.plugin.draft_head import install_draft_head

    install_draft_head(
        *(draft.worker, draft.folder, choice),
        tensor_parallel_size=tensor_parallel_size,
    )


def make_input(num_rows=5):
    import torch

    return torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(1))


def test_draft_extend_makes_the_same_tokens_and_probabilities(draft):
    import torch

    from sgl_eagle_kernels.lm_head import rank_tokens

    install(draft)
    x = make_input()
    wanted = rank_tokens(x, draft.worker.sgl_eagle_head.stored.head, TOPK)
    scores = draft.model.logits_processor._get_logits(x, draft.model.lm_head, None)
    assert scores.shape == (len(x), VOCABULARY)
    shared = SimpleNamespace(next_token_logits_buffer=torch.empty_like(scores))
    again = draft.model.logits_processor._get_logits(x, draft.model.lm_head, shared)
    assert again is shared.next_token_logits_buffer
    assert torch.equal(again, scores)
    probs, ids = scores.softmax(-1).topk(TOPK)
    assert torch.equal(ids, wanted.ids)
    torch.testing.assert_close(probs, wanted.log_probs.exp())


def test_a_draft_step_ranks_the_heads_input(draft, monkeypatch):
    import torch

    from sgl_eagle.plugin import compat
    from sgl_eagle.plugin.draft_head import run_step
    from sgl_eagle_kernels.lm_head import rank_tokens

    x = make_input()

    def run_draft_step(worker, forward_batch, step):
        assert (forward_batch, step) == ("batch", 2)
        scored = worker.draft_runner.model.logits_processor._get_logits(x, None, None)
        return scored, x + 1

    monkeypatch.setattr(compat, "run_draft_step", run_draft_step)
    install(draft)
    log_probs, ids, hidden = run_step(draft.worker, "batch", 2, TOPK)
    wanted = rank_tokens(x, draft.worker.sgl_eagle_head.stored.head, TOPK)
    assert torch.equal(ids, wanted.ids)
    assert torch.equal(log_probs, wanted.log_probs)
    assert torch.equal(hidden, x + 1)
    full = (x @ draft.head.T).log_softmax(-1).topk(TOPK).values
    assert not torch.allclose(log_probs, full)  # else nothing was approximated


def test_rows_that_are_not_finite_stay_so(draft):
    import torch

    install(draft)
    x = make_input()
    x[1, 3] = torch.nan
    scores = draft.worker.sgl_eagle_head(x, None, None)
    assert scores[1].isnan().all()
    assert scores[[0, 2, 3, 4]].isfinite().all()


def test_the_best_stay_the_best_where_the_rest_is_large():
    import torch

    from sgl_eagle.plugin.draft_head import spread_top
    from sgl_eagle_kernels.lm_head import HeadTopk

    found = HeadTopk(
        log_probs=torch.tensor([[-0.5, -20.0]]),
        ids=torch.tensor([[7, 30]]),
        log_normalizer=torch.zeros(1),
        is_finite=torch.ones(1, dtype=torch.bool),
    )
    assert spread_top(found, 41).topk(2).indices.tolist() == [[7, 30]]


@pytest.mark.parametrize(
    ("choice", "config", "tensor_parallel_size"),
    [("full", None, 1), (None, "{}", 1), (None, None, 2)],
    ids=["wanted", "has no other", "several ranks"],
)
def test_the_full_head_stays(draft, choice, config, tensor_parallel_size):
    from sgl_eagle.plugin.draft_head import served_head

    if config is not None:
        (draft.folder / "config.json").write_text(config)
    install(draft, choice, tensor_parallel_size)
    assert served_head(draft.worker) is None
    assert draft.model.logits_processor._get_logits is None


def test_what_the_head_cannot_serve_is_refused(draft):
    from sgl_eagle.plugin.self_check import ServerConfigError
    from sgl_eagle_harness.errors import CheckpointError

    with pytest.raises(
        ServerConfigError, match=r"--tp-size must be at most 1 .* got 2; --sgl-eagle-lm-head full"
    ):
        install(draft, "two-stage", tensor_parallel_size=2)
    draft.worker.topk = 10
    with pytest.raises(
        ServerConfigError, match=r"--speculative-eagle-topk must be at most 9 .* got 10"
    ):
        install(draft)
    config = json.loads((draft.folder / "config.json").read_text())
    (draft.folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="two-stage needs two_stage_head"):
        install(draft, "two-stage")
    (draft.folder / "config.json").write_text(json.dumps(config))
    draft.model.lm_head.weight = -2 * draft.model.lm_head.weight
    with pytest.raises(CheckpointError, match="made for another head"):
        install(draft)


def test_an_engine_that_scores_otherwise_is_refused(draft, monkeypatch):
    from sgl_eagle.plugin import compat

    monkeypatch.setattr(compat, "sglang_version", lambda: "0.5.99")
    del draft.model.logits_processor._get_logits
    with pytest.raises(
        compat.EngineVersionError, match=r"sglang 0\.5\.99 scores .* SimpleNamespace"
    ):
        install(draft)
