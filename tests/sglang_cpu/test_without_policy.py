"""A server without a policy file measures, adapts, counts and records: one for all tests."""

import re
import time
from dataclasses import replace

import numpy as np
import pytest
from server_metrics import read_metrics

from sgl_eagle_harness.cost_file import CostFile, load_cost_file, save_cost_file
from sgl_eagle_harness.ordinary_trace import read_ordinary_trace

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

LIMITS = ("--speculative-num-steps", "3", "--speculative-num-draft-tokens", "8")
WORKLOADS = ("code", "chat")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("costs"), tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def server(fork_server, pair, folders, tmp_path_factory):
    costs, traces = folders
    flags = ("--sgl-eagle-cost-cache", str(costs), "--sgl-eagle-record", str(traces))
    flags += ("--enable-metrics", "--decode-log-interval", "1")  # looks at the clock in each round
    log = tmp_path_factory.mktemp("server") / "log"
    with fork_server.serve(pair, log, *LIMITS, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def answers(server, completions):
    """Every prompt once, labelled."""
    found = []
    for index, (prompt, _) in enumerate(completions):
        label = {"workload": WORKLOADS[index % 2], "prompt_id": f"prompt-{index}"}
        found.append(server.complete(prompt, custom_params={"sgl_eagle": label}))
    return found


def policy_served(server):
    return re.search(r"serves policy (online\S+) at its own costs", server.log.read_text())[1]


def test_greedy_output_is_the_targets_own(server, answers, completions):
    assert [answer["output_ids"] for answer in answers] == [wanted for _, wanted in completions]
    prompts = [prompt for prompt, _ in completions]
    together = server.complete_all(prompts, concurrency=8)
    assert [answer["output_ids"] for answer in together] == [wanted for _, wanted in completions]
    assert policy_served(server) in {"online-plan-3-4-8", "online-price-3-4-8"}


def test_costs_are_measured_up_to_the_servers_limits_and_kept(server, folders):
    (path,) = folders[0].glob("*.json")
    table = load_cost_file(path).to_table()
    assert table.setup.engine == "sglang"
    assert table.extends_every_step
    assert table.rounds_in_a_row
    assert table.launch is None  # a CPU launches nothing that it does not do
    assert table.target.num_tokens.tolist() == [1, 2, 4, 8]
    assert (table.target.batch_size[-1], table.target.context_len[-1]) == (8, 512)
    # Over all cells: a single one may have been measured while the machine did something else.
    assert np.median(table.target.us[-1]) > np.median(table.target.us[0])
    assert "measured its costs in " in server.log.read_text()


@pytest.mark.parametrize(("decide_us", "kind"), [(0.0, "price"), (1e6, "plan")])
def test_the_server_asks_after_every_level_where_that_is_cheap_against_a_round(
    decide_us, kind, server, folders, fork_server, pair, completions, tmp_path
):
    del server  # has measured
    (path,) = folders[0].glob("*.json")
    measured = load_cost_file(path)
    table = measured.to_table()
    # A target that is slow, whatever it verifies: drafts pay even where few are kept.
    us = np.repeat(100 * table.target.us[:, :1], len(table.target.num_tokens), axis=1)
    table = replace(table, target=replace(table.target, us=us), decide_us=decide_us)
    record = CostFile.from_table(
        table, num_repeats=measured.num_repeats, created=measured.created, commit=measured.commit
    )
    save_cost_file(tmp_path / path.name, record)
    flags = ("--sgl-eagle-cost-cache", str(tmp_path), "--enable-metrics")
    with fork_server.serve(pair, tmp_path / "log", *LIMITS, *flags) as doctored:
        prompts = [prompt for prompt, _ in completions]
        answers = doctored.complete_all(prompts, concurrency=1)
        together = doctored.complete_all(prompts, concurrency=8)
        metrics = read_metrics(doctored)
    assert policy_served(doctored) == f"online-{kind}-3-4-8"
    for found in (answers, together):
        assert [answer["output_ids"] for answer in found] == [wanted for _, wanted in completions]
    assert metrics["asks_every_level",] == (kind == "price")
    if kind == "plan":
        assert metrics["planned_verify_size",] == 8
        assert metrics["planned_depth",] == 3
        assert metrics["observed_nodes",] > 0
        # By this table launching is all of a round, and takes longer than rounds do.
        assert metrics["scheduler_us",] == 0


def test_metrics_add_up_to_what_clients_were_told(server, answers):
    del answers
    before = read_metrics(server)
    steps = tokens = correct = 0
    for seed in range(3):
        answer = server.complete([5 + seed, 9, 300], max_new_tokens=20)
        steps += answer["meta_info"]["spec_verify_ct"]
        correct += answer["meta_info"]["spec_num_correct_drafts"]
    found = {key: value - before.get(key, 0.0) for key, value in read_metrics(server).items()}
    tokens = steps + correct
    assert found["steps_total",] == steps
    assert found["accept_tokens_total",] == tokens
    assert found["correct_drafts_total",] == correct
    passes = {k: v for k, v in found.items() if k[0] == "verify_passes_total"}
    assert sum(passes.values()) == steps
    for name in ("verify_size_passes_total", "draft_depth_passes_total"):
        assert sum(v for k, v in found.items() if k[0] == name) == steps
    assert found["drafted_nodes_total",] >= found["proposed_drafts_total",] >= correct
    now = read_metrics(server)
    assert now["price_tok_per_us",] > 0
    assert now["asks_every_level",] == ("price" in policy_served(server))
    # How deep drafting pays is measured, and differs from machine to machine.
    deepest = max(int(k[1]) for k, v in now.items() if k[0] == "draft_depth_passes_total" and v)
    assert deepest > 0 or not now["observed_nodes",]
    stages = {key[1] for key in now if key[0] == "host_stage_seconds_total"}
    assert {"decide", "verify", "extend", "watch"} <= stages
    assert ("draft" in stages) == (deepest > 0)  # a step runs while the first level is looked at


def test_an_ordinary_trace_holds_every_step_with_its_label(answers, completions, folders):
    deadline = time.monotonic() + 300
    wanted = {f"prompt-{index}" for index in range(len(completions))}
    steps = {}
    while time.monotonic() < deadline and set(steps) < wanted:
        time.sleep(0.5)
        steps = {}
        if any(folders[1].glob("*.parquet")):
            header, rows = read_ordinary_trace(folders[1])
            for row in rows:
                if row.prompt_id in wanted:
                    steps.setdefault(row.prompt_id, []).append(row)
    assert header.censored
    assert header.sampling.temperature == 0
    for index, ((prompt, text), answer) in enumerate(zip(completions, answers, strict=True)):
        rows = steps[f"prompt-{index}"]
        assert {row.workload for row in rows} == {WORKLOADS[index % 2]}
        assert len(rows) == answer["meta_info"]["spec_verify_ct"]
        position = 1  # the first token comes from prefill
        for row in rows:
            assert row.position == position
            assert row.context_len == len(prompt) + position - 1
            assert row.tokens[0] == text[position - 1]
            emitted = [*row.tokens[row.accepted].tolist(), row.bonus_token]
            rest = text[position:]
            assert emitted[: len(rest)] == rest[: len(emitted)]
            position += row.num_accept_tokens
        assert position >= len(text)
