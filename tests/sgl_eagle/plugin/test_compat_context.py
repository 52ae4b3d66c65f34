"""Attention is made for texts as long as a row of the table of slots, and nothing else is."""

from types import SimpleNamespace

import pytest
import torch

from sgl_eagle.plugin.compat_context import row_overhang, widen_attention

CONTEXT, OVERHANG = 64, 40


class Runner:
    """Of a model, as far as it makes attention."""

    def __init__(self):
        self.model_config = SimpleNamespace(context_len=CONTEXT)
        table = torch.zeros(3, CONTEXT + OVERHANG, dtype=torch.int32)
        self.req_to_token_pool = SimpleNamespace(req_to_token=table)

    def _get_attention_backend(self, *, init_new_workspace):
        return init_new_workspace, self.model_config.context_len

    def init_attention_backends(self):
        return self.model_config.context_len


class Draft:
    def __init__(self):
        self.draft_runner = Runner()

    def init_attention_backend(self):
        if self.draft_runner.model_config.context_len > CONTEXT:
            raise RuntimeError("made for a row")


@pytest.fixture
def worker():
    target = SimpleNamespace(model_runner=Runner())
    made = SimpleNamespace(target_worker=target, draft_worker=Draft())
    widen_attention(made)
    return made


def test_all_attention_of_a_model_is_made_for_a_row(worker):
    for runner in (worker.target_worker.model_runner, worker.draft_worker.draft_runner):
        assert row_overhang(runner) == OVERHANG
        assert runner.init_attention_backends() == CONTEXT + OVERHANG
        assert runner._get_attention_backend(init_new_workspace=True) == (True, CONTEXT + OVERHANG)
        assert runner.model_config.context_len == CONTEXT


def test_the_context_is_what_it_was_when_no_attention_could_be_made(worker):
    with pytest.raises(RuntimeError, match="made for a row"):
        worker.draft_worker.init_attention_backend()
    assert worker.draft_worker.draft_runner.model_config.context_len == CONTEXT
