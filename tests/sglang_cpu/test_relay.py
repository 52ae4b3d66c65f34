"""Our relay between steps gives what SGLang's gives, and reads and writes what it must alone."""

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

ALL = ["output_tokens", "topk_p", "topk_index", "hidden_states"]


def test_steps_are_given_what_sglang_would_give(fork_server):
    (ours, events), (stock, stock_events) = (
        fork_server.call("relay_rounds", "relay", ours) for ours in (True, False)
    )
    assert ours == stock
    read_and_written = ["gathers", "new_seq_lens", *ALL]
    assert stock_events[1:] == [
        read_and_written if given else read_and_written[1:] for given in stock[1:]
    ]
    assert events[1:] == [
        ["gathers"],  # the step before has left children of its own
        [],
        [],
        ["new_seq_lens", "output_tokens", "gathers"],  # a request has left
        ALL,  # the batch is the one before; its children are new
        ["new_seq_lens", "gathers"],
        ["new_seq_lens", "output_tokens", *ALL],  # a prefill: what waits goes first
        ["new_seq_lens", "gathers"],
        [],
    ]
