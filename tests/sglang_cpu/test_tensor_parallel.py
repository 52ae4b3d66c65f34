"""Two ranks serve one model, although the second one's draft says something else."""

import re
from contextlib import suppress
from dataclasses import replace

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TWO_RANKS = ("--tp-size", "2")
ONE_THREAD_EACH = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
LIMITS = ("--speculative-num-steps", "3", "--speculative-num-draft-tokens", "8")


def serve(fork_server, pair, log, *flags, fault=None):
    return fork_server.serve(pair, log, *TWO_RANKS, *flags, fault=fault, **ONE_THREAD_EACH)


def test_ranks_take_the_steps_of_one(fork_server, pair, policies, completions, tmp_path):
    prompts = [prompt for prompt, _ in completions]
    flags = ("--sgl-eagle-policy", str(policies["price"]))
    with fork_server.serve(pair, tmp_path / "one", *flags) as server:
        wanted = server.complete_all(prompts, concurrency=1)
    log = tmp_path / "two"
    with serve(fork_server, pair, log, *flags, fault="confuse_second_rank") as server:
        alone = server.complete_all(prompts, concurrency=1)
        together = server.complete_all(prompts, concurrency=8)
        sampled = server.complete_all(prompts, concurrency=8, temperature=1.0, min_p=0.1)
        assert server.drain()["num_used_tokens"] == 0
    for answers in (alone, together):
        assert [each["output_ids"] for each in answers] == [text for _, text in completions]
    assert all(len(each["output_ids"]) == len(completions[0][1]) for each in sampled)
    steps = [[each["meta_info"]["spec_verify_ct"] for each in run] for run in (alone, wanted)]
    assert steps[0] == steps[1]


def test_ranks_that_do_not_agree_write_something_else_or_break(
    fork_server, pair, policies, completions, tmp_path
):
    flags = ("--sgl-eagle-policy", str(policies["eagle2"]))
    fault = "confuse_second_rank_that_hears_nothing"
    texts = []
    with (
        serve(fork_server, pair, tmp_path / "log", *flags, fault=fault) as server,
        suppress(OSError),  # each rank may wait for what the other does not send
    ):
        impatient = replace(server, answer_timeout_s=20)
        for prompt, _ in completions:
            texts.append(impatient.complete(prompt)["output_ids"])
    assert texts != [text for _, text in completions]


def test_costs_are_measured_together(fork_server, pair, completions, tmp_path):
    prompts = [prompt for prompt, _ in completions]
    log, costs = tmp_path / "log", tmp_path / "costs"
    flags = (*LIMITS, "--sgl-eagle-cost-cache", str(costs))
    with serve(fork_server, pair, log, *flags, fault="confuse_second_rank") as server:
        answers = server.complete_all(prompts, concurrency=4)
    assert [each["output_ids"] for each in answers] == [text for _, text in completions]
    output = log.read_text()
    assert (
        len(re.findall(r"serves policy online-(?:plan|price)-3-4-8 at its own costs", output)) == 2
    )
    assert len(list(costs.iterdir())) == 1
    with serve(fork_server, pair, log, *flags) as server:
        server.complete(prompts[0])
    assert log.read_text().count("takes its costs from the cache") == 2
