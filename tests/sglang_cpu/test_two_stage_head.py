"""Drafts of the two-stage head are the reference engine's, and text stays the target's."""

import pytest
from server_process import COMPLETION_LENGTH

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module")
def two_stage_pair(fork_server, pair, tmp_path_factory):
    """Folder with the tiny pair, whose draft has a reduced vocabulary, and a two-stage head."""
    folder = tmp_path_factory.mktemp("two_stage")
    fork_server.call("two_stage_pair", "make_two_stage_pair", str(pair), str(folder))
    return folder


@pytest.mark.parametrize(
    ("name", "head"), [("eagle2", None), ("irregular", None), ("eagle2", "full")]
)
def test_steps_are_the_reference_engines(
    name, head, fork_server, pair, two_stage_pair, policies, completions, tmp_path
):
    prompts = [prompt for prompt, _ in completions]
    flags = ["--sgl-eagle-policy", str(policies[name])]
    if head is not None:
        flags += ["--sgl-eagle-lm-head", head]
    with fork_server.serve(two_stage_pair, tmp_path / "log", *flags) as server:
        answers = server.complete_all(prompts, concurrency=4)
        assert server.drain()["num_used_tokens"] == 0
    assert [answer["output_ids"] for answer in answers] == [wanted for _, wanted in completions]
    found = {
        tuple(prompt): answer["meta_info"]["spec_verify_ct"]
        for prompt, answer in zip(prompts, answers, strict=True)
        if len(prompt) > 1  # the reference engine needs a token before the root
    }
    steps = {
        folder: fork_server.call(
            "reference_steps",
            "count_steps",
            *(str(folder), str(policies[name]), list(found), COMPLETION_LENGTH),
        )
        for folder in (pair, two_stage_pair)
    }
    assert steps[pair] != steps[two_stage_pair]
    assert list(found.values()) == steps[two_stage_pair if head is None else pair]
    log = (tmp_path / "log").read_text(encoding="utf-8", errors="replace")
    assert ("drafts with a two-stage LM head of rank 24" in log) == (head is None)
