"""One runtime state a verify size: prepared once, active for a round, SGLang's own put back."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.reference

LIMIT = 8


@pytest.fixture
def built(monkeypatch):
    """Sizes that were captured, in order."""
    from sgl_eagle.plugin import compat_graphs

    sizes = []

    def build(worker, size):
        del worker
        sizes.append(size)
        return f"graphs of {size}"

    def apply(worker, state):
        worker.graphs = state

    monkeypatch.setattr(compat_graphs, "current_verify_state", lambda worker: worker.graphs)
    monkeypatch.setattr(compat_graphs, "build_verify_state", build)
    monkeypatch.setattr(compat_graphs, "apply_verify_state", apply)
    return sizes


def make_worker():
    draft_worker = SimpleNamespace(speculative_num_draft_tokens=LIMIT)
    return SimpleNamespace(
        speculative_num_draft_tokens=LIMIT, draft_worker=draft_worker, graphs="SGLang's"
    )


def test_every_size_but_the_limit_is_captured_largest_first(built):
    from sgl_eagle.plugin.runtime_states import RuntimeStates

    states = RuntimeStates(make_worker(), (1, 2, 4, LIMIT), capture=True)
    assert built == [4, 2, 1]
    assert [states.size_for(nodes) for nodes in range(1, LIMIT + 1)] == [1, 2, 4, 4, 8, 8, 8, 8]


@pytest.mark.parametrize("fails", [False, True])
def test_a_size_is_active_for_as_long_as_the_round(built, fails):
    from sgl_eagle.plugin.runtime_states import RuntimeStates

    worker = make_worker()
    states = RuntimeStates(worker, (1, LIMIT), capture=True)
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


def test_without_graphs_only_the_size_changes(built):
    from sgl_eagle.plugin.runtime_states import RuntimeStates

    worker = make_worker()
    states = RuntimeStates(worker, (1, 4), capture=False)
    assert not states.captured
    with states.active(4):
        assert worker.draft_worker.speculative_num_draft_tokens == 4
        assert worker.graphs == "SGLang's"
    assert worker.draft_worker.speculative_num_draft_tokens == LIMIT
    assert built == []
