"""SGLang's own Triton attention reads our tree mask: its kernels run under Triton's interpreter.

That takes about a second a token, so there are few: the wrong mask shows at the fourth token of the
shortest prompt.
"""

import pytest
from server_process import TRITON_ATTENTION, ForkServer

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

NUM_PROMPTS, LENGTH = 2, 6


@pytest.fixture(scope="module")
def interpreting(tmp_path_factory):
    """Starts servers whose attention is Triton's."""
    log = tmp_path_factory.mktemp("fork_server") / "log"
    running = ForkServer(log, TRITON_ATTENTION, TRITON_INTERPRET="1")
    yield running
    running.close()


@pytest.mark.parametrize("fault", [None, "break_tree_mask"])
def test_triton_attention_reads_the_tree_mask(
    fault, interpreting, pair, policies, completions, tmp_path
):
    chosen = sorted(completions, key=lambda row: len(row[0]))[:NUM_PROMPTS]
    prompts = [prompt for prompt, _ in chosen]
    flags = ("--sgl-eagle-policy", str(policies["irregular"]))
    with interpreting.serve(pair, tmp_path / "log", *flags, fault=fault) as server:
        answers = server.complete_all(prompts, concurrency=NUM_PROMPTS, max_new_tokens=LENGTH)
    found = [answer["output_ids"] for answer in answers]
    assert (found == [completion[:LENGTH] for _, completion in chosen]) == (fault is None)
    if fault is None:
        assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers) > 0
