"""SGLang's own Triton attention reads our tree mask: its kernels run under Triton's interpreter.

That takes a second for two or three tokens, so there are few of them.
"""

import pytest
from server_process import TRITON_ATTENTION, ForkServer

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

NUM_PROMPTS = 2


@pytest.fixture(scope="module")
def interpreting(tmp_path_factory):
    """Starts servers whose attention is Triton's."""
    log = tmp_path_factory.mktemp("fork_server") / "log"
    running = ForkServer(log, TRITON_ATTENTION, TRITON_INTERPRET="1")
    yield running
    running.close()


@pytest.mark.parametrize("fault", [None, "break_tree_mask"])
def test_triton_attention_reads_the_tree_mask(
    fault, interpreting, pair, policies, misled, tmp_path
):
    # Of texts that a wrong mask spoils, as much as it takes to see that.
    chosen = misled[:NUM_PROMPTS]
    length = 1 + max(first for _, _, first in chosen)
    flags = ("--sgl-eagle-policy", str(policies["irregular"]))
    with interpreting.serve(pair, tmp_path / "log", *flags, fault=fault) as server:
        answers = server.complete_all(
            [prompt for prompt, _, _ in chosen], concurrency=NUM_PROMPTS, max_new_tokens=length
        )
    found = [answer["output_ids"] for answer in answers]
    wanted = [completion[:length] for _, completion, _ in chosen]
    assert (found == wanted) == (fault is None)
    if fault is None:
        assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers) > 0
