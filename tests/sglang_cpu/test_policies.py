"""Whatever the policy, greedy output is the target's own, and trees are the reference engine's."""

import pytest
from server_process import reference_step_counts, serve

from sgl_eagle_harness.policies.policy_file import load_policy_file

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

NEVER_DRAFTS = {"plain", "price_dear"}


@pytest.mark.parametrize("name", ["plain", "chain", "irregular", "eagle2", "price", "price_dear"])
def test_greedy_output_is_the_targets_own(name, pair, policies, completions, tmp_path):
    prompts = [prompt for prompt, _ in completions]
    wanted = [completion for _, completion in completions]
    with serve(pair, tmp_path / "log", "--sgl-eagle-policy", str(policies[name])) as server:
        alone = server.complete_all(prompts, concurrency=1)
        together = server.complete_all(prompts, concurrency=8)
        assert server.drain()["num_used_tokens"] == 0
    assert [answer["output_ids"] for answer in alone] == wanted
    assert [answer["output_ids"] for answer in together] == wanted
    correct_drafts = sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in alone)
    assert (correct_drafts == 0) == (name in NEVER_DRAFTS)
    assert f"policy {load_policy_file(policies[name]).build().name} " in server.log.read_text()


@pytest.mark.parametrize("name", ["chain", "irregular", "eagle2"])
def test_the_server_drafts_what_the_reference_engine_drafts(
    name, pair, policies, completions, tmp_path
):
    prompts = [prompt for prompt, _ in completions if len(prompt) > 1]
    with serve(pair, tmp_path / "log", "--sgl-eagle-policy", str(policies[name])) as server:
        answers = server.complete_all(prompts, concurrency=4)
    found = [answer["meta_info"]["spec_verify_ct"] for answer in answers]
    assert found == reference_step_counts(pair, policies[name], prompts)


def test_a_wrong_tree_mask_changes_the_output(pair, policies, completions, tmp_path):
    prompts = [prompt for prompt, _ in completions]
    flags = ("--sgl-eagle-policy", str(policies["eagle2"]))
    broken = {"SGL_EAGLE_TEST_BROKEN_TREE_MASK": "1"}
    with serve(pair, tmp_path / "log", *flags, **broken) as server:
        answers = server.complete_all(prompts, concurrency=4)
    assert [answer["output_ids"] for answer in answers] != [wanted for _, wanted in completions]
