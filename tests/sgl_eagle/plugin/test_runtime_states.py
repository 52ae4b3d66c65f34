"""One runtime state a verify size: prepared once, used until another is or SGLang prefills."""

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

    def apply(worker, state):
        worker.graphs = state

    monkeypatch.setattr(compat_graphs, "current_verify_state", lambda worker: worker.graphs)
    monkeypatch.setattr(compat_graphs, "build_verify_state", build)
    monkeypatch.setattr(compat_graphs, "apply_verify_state", apply)
    monkeypatch.setattr(compat_plain, "build_plain_state", build_plain)
    return sizes


def make_states(worker, sizes, *, capture=True, keeps_features=True):
    from sgl_eagle.plugin.runtime_states import RuntimeStates

    return RuntimeStates(worker, sizes, capture=capture, keeps_features=keeps_features)


class FlashAttentionBackend:
    """Remembers one size of trees, as SGLang's does."""

    speculative_num_draft_tokens = LIMIT


def make_worker():
    draft_worker = SimpleNamespace(speculative_num_draft_tokens=LIMIT)
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


def test_a_size_is_used_until_another_is_or_sglang_prefills(built):
    worker = make_worker()
    states = make_states(worker, (1, LIMIT))
    states.use(1)
    assert worker.graphs == "graphs of 1"
    assert worker.draft_worker.speculative_num_draft_tokens == 1
    assert worker.graphs == "graphs of 1"
    assert worker.draft_worker.speculative_num_draft_tokens == 1
    states.use(LIMIT)
    assert worker.graphs == "SGLang's"
    assert worker.draft_worker.speculative_num_draft_tokens == LIMIT
    states.use(1)
    assert worker.graphs == "graphs of 1"
    states.rest()
    assert worker.graphs == "SGLang's"
    assert worker.draft_worker.speculative_num_draft_tokens == LIMIT
    assert built == [1]


@pytest.mark.usefixtures("built")
def test_a_round_like_the_one_before_switches_nothing(monkeypatch):
    from sgl_eagle.plugin import compat_graphs

    worker, applied = make_worker(), []
    states = make_states(worker, (1, 4, LIMIT))
    monkeypatch.setattr(
        compat_graphs, "apply_verify_state", lambda _, graphs: applied.append(graphs)
    )
    for size in (4, 4, 1, 4):
        states.use(size)
    states.rest()
    states.rest()
    assert applied == ["graphs of 4", "graphs of 1", "graphs of 4", "SGLang's"]


@pytest.mark.parametrize(
    ("keeps_features", "graphs"),
    [
        (False, "plain graphs beside graphs of 1"),
        (True, "plain graphs beside graphs of 1, with features"),
    ],
)
def test_plain_decoding_has_graphs_of_its_own_and_extends_one_token(built, keeps_features, graphs):
    worker = make_worker()
    states = make_states(worker, (1, LIMIT), keeps_features=keeps_features)
    states.use_plain()
    assert worker.graphs == graphs
    assert worker.draft_worker.speculative_num_draft_tokens == 1
    states.rest()
    assert worker.graphs == "SGLang's"
    assert worker.draft_worker.speculative_num_draft_tokens == LIMIT
    assert built == [1]


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_without_graphs_only_the_size_changes(built, is_hybrid):
    worker = make_worker()
    runner = worker.target_worker.model_runner
    attention = runner.attn_backend
    if is_hybrid:
        runner.attn_backend = SimpleNamespace(prefill_backend=attention, decode_backend=object())
    states = make_states(worker, (1, 4), capture=False)
    assert not states.captured
    states.use(4)
    assert worker.draft_worker.speculative_num_draft_tokens == 4
    assert attention.speculative_num_draft_tokens == 4
    assert worker.graphs == "SGLang's"
    states.use_plain()
    assert worker.draft_worker.speculative_num_draft_tokens == 1
    assert attention.speculative_num_draft_tokens == 1
    states.rest()
    assert worker.draft_worker.speculative_num_draft_tokens == LIMIT
    assert attention.speculative_num_draft_tokens == LIMIT
    assert built == []


def test_a_size_that_was_not_captured_is_verified_without_graphs(built):
    worker = make_worker()
    attention = worker.target_worker.model_runner.attn_backend
    states = make_states(worker, (4, LIMIT))
    states.use(1)
    assert attention.speculative_num_draft_tokens == 1
    states.use(4)
    assert worker.graphs == "graphs of 4"
    assert attention.speculative_num_draft_tokens == LIMIT
    states.use(1)
    assert worker.graphs == "SGLang's"
    states.rest()
    assert attention.speculative_num_draft_tokens == LIMIT
    assert worker.graphs == "SGLang's"
    assert built == [4]
