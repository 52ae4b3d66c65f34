"""Our relay between steps gives what SGLang's gives, and writes nothing that it holds already."""

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_what_a_step_hands_on_unchanged_is_not_written(fork_server):
    ours, stock = (fork_server.call("relay_rounds", "relay", ours) for ours in (True, False))
    assert [step[1:] for step in ours] == [step[1:] for step in stock]
    # Steps that change nothing put a mark on what they hand on, which SGLang's writes.
    marks = [[0, 0, 0], [1, 1], [2, 2], [1, 0, 0]]
    for found, usual, marked in zip(ours, stock, marks, strict=True):
        wanted = [[prob + mark for prob in row] for row, mark in zip(found[0], marked, strict=True)]
        assert usual[0] == [pytest.approx(row, abs=1e-5) for row in wanted]
