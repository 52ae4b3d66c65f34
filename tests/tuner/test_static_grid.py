from dataclasses import fields

import numpy as np
import pytest

from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.types import TreeLimits
from sgl_eagle_tuner.replay import replay_positions
from sgl_eagle_tuner.static_grid import grid_limits, replay_grid


def test_grid_equals_replaying_each_setting(corpus, costs):
    settings = grid_limits(corpus.trace.header, costs)
    tables = list(replay_grid(corpus.trace, settings))
    assert [limits for limits, _ in tables] == sorted(settings, key=lambda limits: limits.topk)
    for limits, table in tables:
        alone = replay_positions(corpus.trace, Eagle2Policy(limits=limits))
        for item in fields(table):
            np.testing.assert_equal(
                getattr(table, item.name), getattr(alone, item.name), err_msg=str(limits)
            )


def test_grid_holds_chains_once_and_trees_within_their_budget(corpus, costs):
    settings = grid_limits(corpus.trace.header, costs)
    chains = [limits for limits in settings if limits.topk == 1]
    assert [(c.num_steps, c.num_draft_tokens) for c in chains] == [(s, s + 1) for s in range(1, 5)]
    assert {limits.topk for limits in settings} == {1, 2, 4}
    assert all(s.num_draft_tokens <= s.largest_num_draft_tokens for s in settings)
    assert len(settings) == len(set(settings))


def test_grid_stays_within_the_cost_table(corpus, cost_maker):
    costs = cost_maker(largest=4)
    settings = grid_limits(corpus.trace.header, costs)
    assert max(limits.num_draft_tokens for limits in settings) == 4


def test_settings_beyond_the_trace_are_marked(corpus):
    deeper = TreeLimits(num_steps=5, topk=2, num_draft_tokens=8)
    covered = TreeLimits(num_steps=4, topk=2, num_draft_tokens=8)
    tables = dict(replay_grid(corpus.trace, [deeper, covered]))
    assert tables[deeper].uncovered.all()
    assert not tables[covered].uncovered.any()
    np.testing.assert_array_equal(
        tables[deeper].num_accept_tokens, tables[covered].num_accept_tokens
    )


@pytest.mark.parametrize("batch_size", [1, 4])
def test_tables_note_their_batch_size(corpus, batch_size):
    settings = [TreeLimits(num_steps=2, topk=2, num_draft_tokens=3)]
    ((_, table),) = replay_grid(corpus.trace, settings, batch_size=batch_size)
    assert table.batch_size == batch_size
