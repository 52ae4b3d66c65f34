"""SmolLM2-135M-Instruct and the shipped draft, as a user serves them."""

import os
from pathlib import Path

import pytest

import sgl_eagle

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TARGET_VARIABLE = "SGLEAGLE_TARGET"
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Name three colours.",
)
LENGTH = 32


@pytest.fixture
def real_pair(tmp_path):
    """Folder with the exported target and the shipped draft."""
    target = os.environ.get(TARGET_VARIABLE)
    if target is None:
        pytest.skip(f"needs {TARGET_VARIABLE}, a folder that `sgl-eagle export` wrote")
    draft = Path(sgl_eagle.__file__).parent / "assets" / "draft"
    for name, path in (("target", Path(target)), ("draft", draft)):
        (tmp_path / name).symlink_to(path.resolve(strict=True))
    return tmp_path


def test_the_shipped_draft_speeds_up_smollm2(fork_server, real_pair, policies, tmp_path):
    target = str(real_pair / "target")
    rows = fork_server.call("hugging_face", "chat", target, QUESTIONS, LENGTH)
    question = {"role": "user", "content": QUESTIONS[0]}
    body = {"model": "smollm2", "messages": [question], "temperature": 0, "max_tokens": LENGTH}
    flags = ("--sgl-eagle-policy", str(policies["eagle2"]))
    with fork_server.serve(real_pair, tmp_path / "log", *flags) as server:
        whole = server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        answers = server.complete_all(
            [prompt for prompt, _, _ in rows],
            concurrency=len(rows),
            max_new_tokens=LENGTH,
            ignore_eos=False,
        )
        assert server.drain()["num_used_tokens"] == 0
    assert whole == rows[0][2]
    assert [answer["output_ids"] for answer in answers] == [tokens for _, tokens, _ in rows]
    num_passes = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert sum(len(tokens) for _, tokens, _ in rows) > 1.5 * num_passes


def test_the_two_stage_head_drafts_what_the_reference_engine_drafts(
    fork_server, real_pair, policies, tmp_path
):
    target = str(real_pair / "target")
    prompts = [row[0] for row in fork_server.call("hugging_face", "chat", target, QUESTIONS, 1)]
    policy = str(policies["eagle2"])
    flags = ("--sgl-eagle-policy", policy)
    with fork_server.serve(real_pair, tmp_path / "log", *flags) as server:
        answers = server.complete_all(prompts, concurrency=1, max_new_tokens=LENGTH)
    found = [answer["meta_info"]["spec_verify_ct"] for answer in answers]
    arguments = (str(real_pair), policy, prompts, LENGTH)
    steps = fork_server.call("reference_steps", "count_steps", *arguments)
    # Two engines sum in another order: a near tie may fall the other way.
    assert sum(found) == pytest.approx(sum(steps), abs=len(prompts))
    log = (tmp_path / "log").read_text(encoding="utf-8", errors="replace")
    assert "drafts with a two-stage LM head of rank" in log
