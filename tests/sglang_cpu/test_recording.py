"""Dense traces of a server: replay on them says what a server under a policy does."""

import os
import signal
import time

import numpy as np
import pytest

from sgl_eagle.plugin.trace_pipe import SECONDS_PER_WRITE
from sgl_eagle_harness.ordinary_trace import read_ordinary_trace
from sgl_eagle_harness.policies.policy_file import load_policy_file
from sgl_eagle_harness.trace_store import read_dense_trace
from sgl_eagle_tuner.replay import replay_positions

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

END_OF_TEXT = 1


def wait_for_shards(folder, num_prompts, read):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if any(folder.glob("*.parquet")) and len(read()) >= num_prompts:
            return read()
        time.sleep(0.5)
    raise AssertionError(f"{folder} holds {len(read())} of {num_prompts} prompts")


def label(index):
    return {"sgl_eagle": {"workload": "code", "prompt_id": f"prompt-{index}"}}


@pytest.fixture(scope="module")
def texts(completions):
    """Prompts whose completion the target would not have ended."""
    return [(prompt, text) for prompt, text in completions if END_OF_TEXT not in text[:-1]][:6]


@pytest.fixture(scope="module")
def dense_trace(fork_server, pair, texts, tmp_path_factory):
    """Recorded by a server whose scheduler is killed soon after the last answer."""
    folder = tmp_path_factory.mktemp("dense")
    flags = ("--sgl-eagle-record", str(folder), "--sgl-eagle-record-mode", "dense")
    limits = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "4")
    with fork_server.serve(pair, tmp_path_factory.mktemp("log") / "log", *flags, *limits) as server:
        first = server.complete(texts[0][0], custom_params=label(0))
        assert first["meta_info"]["spec_verify_ct"] == len(texts[0][1]) - 1
        wait_for_shards(folder, 1, lambda: read_dense_trace(folder).prompt_ids)
        for index, (prompt, _) in enumerate(texts[1:], start=1):
            server.complete(prompt, custom_params=label(index))
        # A bias decides this text, so it must not be recorded.
        server.complete([7, 8], custom_params=label(99), logit_bias={"77": 1000.0})
        time.sleep(10 * SECONDS_PER_WRITE)
        scheduler = int(next(folder.glob("*.parquet")).stem.split("-")[2])
        os.kill(scheduler, signal.SIGKILL)
        wait_for_shards(folder, len(texts), lambda: read_dense_trace(folder).prompt_ids)
    return read_dense_trace(folder)


def test_a_dense_trace_holds_the_targets_text_and_whole_trees(dense_trace, texts):
    assert sorted(dense_trace.prompt_ids) == [f"prompt-{index}" for index in range(len(texts))]
    assert dense_trace.header.engine == "sglang"
    assert not dense_trace.header.censored
    starts = dense_trace.prompt_starts
    for place, name in enumerate(dense_trace.prompt_ids):
        prompt, text = texts[int(name.removeprefix("prompt-"))]
        rows = slice(starts[place], starts[place + 1])
        assert dense_trace.next_token[rows].tolist() == text[1:]
        assert dense_trace.context_len[rows].tolist() == list(
            range(len(prompt), len(prompt) + len(text) - 1)
        )
        assert ((dense_trace.depths[rows] > 0).sum(axis=1) == 4 + 16 + 16).all()


def test_replay_of_it_takes_the_steps_that_a_server_takes(
    dense_trace, fork_server, pair, policies, texts, tmp_path
):
    folder = tmp_path / "ordinary"
    flags = ("--sgl-eagle-policy", str(policies["eagle2"]), "--sgl-eagle-record", str(folder))
    with fork_server.serve(pair, tmp_path / "log", *flags) as server:
        for index, (prompt, _) in enumerate(texts):
            server.complete(prompt, custom_params=label(index))
        steps = wait_for_shards(
            folder, len(texts), lambda: _by_prompt(read_ordinary_trace(folder)[1])
        )
    table = replay_positions(dense_trace, load_policy_file(policies["eagle2"]).build())
    assert table.uncovered_share == 0
    starts = dense_trace.prompt_starts
    for place, name in enumerate(dense_trace.prompt_ids):
        served = [step.num_accept_tokens for step in steps[name]]
        replayed, row = [], starts[place]
        while row < starts[place + 1]:
            replayed.append(int(table.num_accept_tokens[row]))
            row += replayed[-1]
        # The last step may emit more than the text's limit lets through; replay cuts it there.
        assert len(served) == len(replayed)
        assert served[:-1] == replayed[:-1]
        assert served[-1] >= replayed[-1]
        sizes = [len(step.tokens) for step in steps[name]]
        at = np.cumsum([starts[place], *replayed[:-1]])
        assert table.num_draft_tokens[at].tolist() == sizes


def _by_prompt(steps):
    found = {}
    for step in steps:
        found.setdefault(step.prompt_id, []).append(step)
    return found
