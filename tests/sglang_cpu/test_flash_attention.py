"""SGLang's FlashAttention-3 backend reads our trees: its page tables are real, its kernels are not.

The target verifies without graphs, since the server runs on a CPU; what a graph would read is
checked alone.
"""

import pytest
from server_process import COMPLETION_LENGTH, SHORT_CONTEXT

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

ATTENTION = ("--attention-backend", "fa3")
DRAFT_ATTENTION = "--speculative-draft-attention-backend"

MULTI_STEP = {
    "fa3": "FlashAttentionMultiStepBackend",
    "intel_amx": "IntelAMXMultiStepDraftBackend",
}
"""SGLang's classes."""


@pytest.fixture(scope="module")
def flash_server(fork_server):
    """Starts servers whose attention is FlashAttention-3's."""
    return fork_server.with_attention(ATTENTION)


@pytest.mark.parametrize(
    ("name", "draft", "in_graphs"),
    [
        *((name, "fa3", False) for name in ("irregular", "plan", "price_late")),
        *((name, "fa3", True) for name in ("narrow", "eagle2", "price")),
        ("price", "intel_amx", False),
    ],
)
def test_greedy_output_is_the_targets_own(
    name, draft, in_graphs, flash_server, pair, policies, completions, tmp_path
):
    prompts = [prompt for prompt, _ in completions]
    wanted = [completion for _, completion in completions]
    flags = ("--sgl-eagle-policy", str(policies[name]), DRAFT_ATTENTION, draft)
    if name == "narrow":
        flags += ("--speculative-eagle-topk", "4")
    fault = "hopper.pretend_with_draft_graphs" if in_graphs else "hopper.pretend"
    with flash_server.serve(pair, log := tmp_path / "log", *flags, fault=fault) as running:
        alone = running.complete_all(prompts, concurrency=1)
        together = running.complete_all(prompts, concurrency=8)
        assert running.drain()["num_used_tokens"] == 0
    said = log.read_text()
    assert f"with FlashAttentionBackend and {MULTI_STEP[draft]}" in said
    assert (" draft steps for batches of [2, 8]" in said) == in_graphs
    assert [answer["output_ids"] for answer in alone] == wanted
    assert [answer["output_ids"] for answer in together] == wanted
    # Steps say that the draft, too, has read what it should: of a draft without a past they differ.
    found = {
        tuple(prompt): answer["meta_info"]["spec_verify_ct"]
        for prompt, answer in zip(prompts, alone, strict=True)
        if len(prompt) > 1
    }
    arguments = (str(pair), str(policies[name]), list(found), COMPLETION_LENGTH)
    assert list(found.values()) == flash_server.call("reference_steps", "count_steps", *arguments)


def test_texts_that_fill_the_context_are_the_targets_own(
    flash_server, pair, policies, filled_contexts, tmp_path
):
    prompts = [prompt for prompt, _ in filled_contexts]
    flags = ("--context-length", str(SHORT_CONTEXT), "--sgl-eagle-policy", str(policies["bushy"]))
    flags += (DRAFT_ATTENTION, "fa3")
    fault = "hopper.pretend_with_draft_graphs"
    with flash_server.serve(pair, tmp_path / "log", *flags, fault=fault) as running:
        answers = running.complete_all(prompts, concurrency=8, max_new_tokens=None)
        assert running.drain()["num_used_tokens"] == 0
    assert [answer["output_ids"] for answer in answers] == [text for _, text in filled_contexts]


def test_a_wrong_tree_mask_changes_the_output(flash_server, pair, policies, completions, tmp_path):
    prompts = [prompt for prompt, _ in completions]
    flags = ("--sgl-eagle-policy", str(policies["eagle2"]), DRAFT_ATTENTION, "fa3")
    fault = "hopper.pretend_and_break_tree_mask"
    with flash_server.serve(pair, tmp_path / "log", *flags, fault=fault) as running:
        answers = running.complete_all(prompts, concurrency=4)
    assert [answer["output_ids"] for answer in answers] != [wanted for _, wanted in completions]


def test_a_graph_that_verifies_reads_the_ancestors_of_each_node(flash_server):
    pairs = flash_server.call("flash_tables", "read_trees", 0)
    assert len(pairs) > 1000
    assert [found for _, found in pairs] == [wanted for wanted, _ in pairs]
