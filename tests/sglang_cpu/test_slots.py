"""Slots are reserved for several rounds at once, and a round always finds those that it needs."""

import json

import pytest
from slot_rounds import NUM_ROUNDS, NUM_STEPS, ROUND_SLOTS

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.mark.parametrize(
    ("most_accepted", "rounds_between"), [(1, 6), (NUM_STEPS + 1, 2)], ids=["plain", "trees"]
)
def test_a_round_finds_its_slots_and_few_rounds_allocate(
    most_accepted, rounds_between, fork_server
):
    found = fork_server.call("slot_rounds", "simulate", most_accepted)
    # Exactly what may be missing is: the host knows all but the latest round.
    assert found["room"] == ROUND_SLOTS + NUM_STEPS + 1 - most_accepted
    assert found["wrong"] == 0
    assert found["rounds_topped_up"] < NUM_ROUNDS / rounds_between


def test_a_round_that_allocates_nothing_is_prepared_as_by_sglang(fork_server):
    usual, ours = fork_server.call("slot_rounds", "compare")
    assert ours == usual


@pytest.mark.parametrize("name", ["plain", "plan", "price_late", "eagle2"])
def test_rounds_of_a_server_find_their_slots(
    name, fork_server, pair, policies, completions, tmp_path
):
    prompts = [prompt for prompt, _ in completions]
    found = tmp_path / "found.json"
    flags = ("--sgl-eagle-policy", str(policies[name]))
    with fork_server.serve(
        pair, tmp_path / "log", *flags, fault="slot_watch.install", SLOT_WATCH_FILE=str(found)
    ) as server:
        answers = server.complete_all(prompts, concurrency=5)
        assert server.drain()["num_used_tokens"] == 0
    assert [answer["output_ids"] for answer in answers] == [wanted for _, wanted in completions]
    watched = json.loads(found.read_text())
    assert watched["room"] >= watched["round_slots"]
    assert watched["lag"] > (name != "plain")  # one token each, or more
    assert watched["rounds_topped_up"] < watched["rounds"] / 2
