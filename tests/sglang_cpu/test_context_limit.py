"""Requests may fill the context: what a round writes beyond it stays in their own rows.

A round of five steps of four branches takes twenty slots behind a text, twice that is reserved, and
rows of SGLang's table of slots have room for the eight tokens that are verified, and four.
"""

import re

import pytest
from server_process import SHORT_CONTEXT

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.mark.parametrize("name", ["bushy", "price_late_bushy"])
def test_texts_that_fill_the_context_are_the_targets_own(
    name, fork_server, pair, policies, filled_contexts, tmp_path
):
    prompts = [prompt for prompt, _ in filled_contexts]
    flags = ("--context-length", str(SHORT_CONTEXT), "--sgl-eagle-policy", str(policies[name]))
    fault = "attention_lengths.tell"
    with fork_server.serve(pair, log := tmp_path / "log", *flags, fault=fault) as server:
        alone = server.complete_all(prompts, concurrency=1, max_new_tokens=None)
        together = server.complete_all(prompts, concurrency=8, max_new_tokens=None)
        assert server.drain()["num_used_tokens"] == 0
    wanted = [completion for _, completion in filled_contexts]
    assert [answer["output_ids"] for answer in alone] == wanted
    assert [answer["output_ids"] for answer in together] == wanted
    # Attention on a GPU would read and write beyond its lists, where that of this server does not.
    told = re.findall(r"(\S+) holds (\d+) of (\d+)", log.read_text())
    assert len(told) >= 3
    assert [held for _, held, _ in told] == [length for _, _, length in told]
