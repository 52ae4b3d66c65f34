"""Whatever the policy, greedy output is the target's own, and trees are the reference engine's."""

import pytest
from server_process import COMPLETION_LENGTH

from sgl_eagle_harness.policies.policy_file import load_policy_file

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

NEVER_DRAFTS = {"plain", "price_dear"}
WIDER_SERVER = {"narrow_chain", "narrow"}
"""Whose server drafts four children of a node, of which they take fewer."""
FOLLOWED = {"chain", "irregular", "eagle2"} | WIDER_SERVER
"""Whose trees depend on nothing but the draft, so that both engines must take the same steps."""
FOLLOWED_ALONE = {"plan", "price", "price_late", "price_pruned"}
"""Whose decisions depend on the batch too. The pruned one drafts always and often finds no draft
worth verifying, so that rounds which have drafted end as plain ones. The late one changes from
plain decoding to speculation, so that the draft must have caught up with all that was decoded
plainly."""


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "chain", "narrow_chain", "narrow", "irregular", "eagle2"),
        *("plan", "price", "price_dear", "price_late", "price_pruned"),
    ],
)
def test_greedy_output_is_the_targets_own(name, fork_server, pair, policies, completions, tmp_path):
    prompts = [prompt for prompt, _ in completions]
    wanted = [completion for _, completion in completions]
    flags = ("--sgl-eagle-policy", str(policies[name]))
    if name in WIDER_SERVER:
        flags += ("--speculative-eagle-topk", "4")
    with fork_server.serve(pair, tmp_path / "log", *flags) as server:
        alone = server.complete_all(prompts, concurrency=1)
        together = server.complete_all(prompts, concurrency=8)
        assert server.drain()["num_used_tokens"] == 0
    assert [answer["output_ids"] for answer in alone] == wanted
    assert [answer["output_ids"] for answer in together] == wanted
    correct_drafts = sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in alone)
    assert (correct_drafts == 0) == (name in NEVER_DRAFTS)
    assert f"policy {load_policy_file(policies[name]).build().name} " in server.log.read_text()
    if name in FOLLOWED | FOLLOWED_ALONE:
        # The reference engine needs a token before the root.
        found = {
            tuple(prompt): answer["meta_info"]["spec_verify_ct"]
            for prompt, answer in zip(prompts, together if name in FOLLOWED else alone, strict=True)
            if len(prompt) > 1
        }
        arguments = (str(pair), str(policies[name]), list(found), COMPLETION_LENGTH)
        steps = fork_server.call("reference_steps", "count_steps", *arguments)
        assert list(found.values()) == steps


def test_a_wrong_tree_mask_changes_the_output(fork_server, pair, policies, completions, tmp_path):
    prompts = [prompt for prompt, _ in completions]
    flags = ("--sgl-eagle-policy", str(policies["eagle2"]))
    with fork_server.serve(pair, tmp_path / "log", *flags, fault="break_tree_mask") as server:
        answers = server.complete_all(prompts, concurrency=4)
    assert [answer["output_ids"] for answer in answers] != [wanted for _, wanted in completions]
