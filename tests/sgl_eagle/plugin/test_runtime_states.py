"""One runtime state a verify size: prepared once, active for a round, SGLang's own put back."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.reference

LIMIT = 8


@pytest.fixture
def built(monkeypatch):
    """Sizes that were captured, in order."""
    from sgl_eagle.plugin import compat_graphs, compat_plain

    sizes = []

    def build(worker, size):
        del worker
        sizes.append(size)
        return f"graphs of {size}"

    def build_plain(worker, state, *, keeps_features):
        del worker
        return f"plain graphs beside {state}{', with features' * keeps_features}"

    def build_catch_up(worker, state, num_tokens):
        del worker
        return f"{num_tokens} tokens without scores beside {state}"

    def apply(worker, state):
        worker.graphs = state

    monkeypatch.setattr(compat_graphs, "current_verify_state", lambda worker: worker.graphs)
    monkeypatch.setattr(compat_graphs, "build_verify_state", build)
    monkeypatch.setattr(compat_graphs, "apply_verify_state", apply)
    monkeypatch.setattr(compat_graphs, "build_catch_up_state", build_catch_up)
    monkeypatch.setattr(compat_plain, "build_plain_state", build_plain)
    return sizes


def make_states(worker, sizes, *, capture=True, window=LIMIT):
    from sgl_eagle.plugin.runtime_states import RuntimeStates

    return RuntimeStates(worker, sizes, capture=capture, window=window)


class FlashAttentionBackend:
    """Remembers one size of trees, as SGLang's does."""

    speculative_num_draft_tokens = LIMIT


def make_worker():
    processor = SimpleNamespace(_get_logits="scores")
    draft_worker = SimpleNamespace(
        speculative_num_draft_tokens=LIMIT,
        topk=4,
        draft_runner=SimpleNamespace(model=SimpleNamespace(logits_processor=processor)),
    )
    target = SimpleNamespace(attn_backend=FlashAttentionBackend())
    return SimpleNamespace(
        speculative_num_draft_tokens=LIMIT,
        draft_worker=draft_worker,
        target_worker=SimpleNamespace(model_runner=target),
        graphs="SGLang's",
    )


def test_every_size_but_the_limit_is_captured_largest_first(built):
    states = make_states(make_worker(), (1, 2, 4, LIMIT))
    assert built == [4, 2, 1]
    assert [states.size_for(nodes) for nodes in range(1, LIMIT + 1)] == [1, 2, 4, 4, 8, 8, 8, 8]


@pytest.mark.parametrize("fails", [False, True])
def test_a_size_is_active_for_as_long_as_the_round(built, fails):
    worker = make_worker()
    states = make_states(worker, (1, LIMIT))
    try:
        with states.active(1):
            assert worker.graphs == "graphs of 1"
            assert worker.draft_worker.speculative_num_draft_tokens == 1
            if fails:
                raise LookupError
    except LookupError:
        pass
    assert worker.graphs == "SGLang's"
    assert worker.draft_worker.speculative_num_draft_tokens == LIMIT
    with states.active(LIMIT):
        assert worker.graphs == "SGLang's"
    assert built == [1]


@pytest.mark.parametrize(
    ("window", "graphs"),
    [
        (None, "plain graphs beside graphs of 1"),
        (LIMIT, "plain graphs beside graphs of 1, with features"),
    ],
)
def test_plain_decoding_has_graphs_of_its_own_and_extends_one_token(built, window, graphs):
    worker = make_worker()
    states = make_states(worker, (1, LIMIT), window=window)
    with states.plain():
        assert worker.graphs == graphs
        assert worker.draft_worker.speculative_num_draft_tokens == 1
    assert worker.graphs == "SGLang's"
    assert worker.draft_worker.speculative_num_draft_tokens == LIMIT
    assert built == [1]


def test_a_draft_that_catches_up_scores_nothing(built):
    worker = make_worker()
    states = make_states(worker, (1, 4, LIMIT), window=4)
    processor = worker.draft_worker.draft_runner.model.logits_processor
    with states.catching_up(4):
        assert worker.graphs == "4 tokens without scores beside graphs of 4"
        assert worker.draft_worker.speculative_num_draft_tokens == 4
        assert processor._get_logits != "scores"
    assert worker.graphs == "SGLang's"
    assert worker.draft_worker.speculative_num_draft_tokens == LIMIT
    assert processor._get_logits == "scores"
    assert built == [4, 1]


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_without_graphs_only_the_size_changes(built, is_hybrid):
    worker = make_worker()
    runner = worker.target_worker.model_runner
    attention = runner.attn_backend
    if is_hybrid:
        runner.attn_backend = SimpleNamespace(prefill_backend=attention, decode_backend=object())
    states = make_states(worker, (1, 4), capture=False, window=4)
    assert not states.captured
    with states.active(4):
        assert worker.draft_worker.speculative_num_draft_tokens == 4
        assert attention.speculative_num_draft_tokens == 4
        assert worker.graphs == "SGLang's"
    with states.plain():
        assert worker.draft_worker.speculative_num_draft_tokens == 1
        assert attention.speculative_num_draft_tokens == 1
    assert worker.draft_worker.speculative_num_draft_tokens == LIMIT
    assert attention.speculative_num_draft_tokens == LIMIT
    assert built == []


def test_a_size_that_was_not_captured_is_verified_without_graphs(built):
    worker = make_worker()
    attention = worker.target_worker.model_runner.attn_backend
    states = make_states(worker, (4, LIMIT))
    with states.active(1):
        assert attention.speculative_num_draft_tokens == 1
    assert attention.speculative_num_draft_tokens == LIMIT
    assert worker.graphs == "SGLang's"
    assert built == [4]
