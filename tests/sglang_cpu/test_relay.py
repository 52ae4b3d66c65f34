"""Our relay between steps gives what SGLang's gives, and reads and writes what it must alone."""

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

ALL = ["output_tokens", "topk_p", "topk_index", "hidden_states"]


def test_steps_are_given_what_sglang_would_give(fork_server):
    (ours, events), (stock, stock_events) = (
        fork_server.call("relay_rounds", "relay", ours) for ours in (True, False)
    )
    assert ours == stock
    assert stock_events[1:] == [["gathers", *ALL] if given else ALL for given in stock[1:]]
    assert events[1:] == [
        ["gathers"],  # the step before has left children of its own
        [],
        [],
        ["output_tokens", "gathers"],  # a request has left
        ALL,  # the batch is the one before; its children are new
        ["gathers"],
        ["output_tokens", *ALL],  # a prefill: what waits goes first
        ["gathers"],
        [],
    ]
