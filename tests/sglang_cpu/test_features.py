"""What clients of a server rely on, from one that always speculates and one that begins plainly."""

import json
import math
import random
import urllib.error
from collections import Counter

import pytest
from server_process import CONTEXT_LENGTH
from soak import KINDS, Known, soak

from sgl_eagle_harness.policies.policy_file import load_policy_file

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

STOP_RANGE = range(4, 20)


@pytest.fixture(
    scope="module",
    params=[("irregular", None), ("price_late", "overlap.install")],
    ids=["irregular", "price_late_overlapping"],
)
def server(request, fork_server, pair, policies, tmp_path_factory):
    policy, fault = request.param
    flags = (
        *("--sgl-eagle-policy", str(policies[policy])),
        *("--chunked-prefill-size", "16", "--enable-metrics"),
    )
    log = tmp_path_factory.mktemp("server") / "log"
    with fork_server.serve(pair, log, *flags, fault=fault) as running:
        yield running


def _chat(text, **fields):
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 24,
        "ignore_eos": True,
    } | fields


def test_a_streamed_chat_is_the_whole_chat(server):
    whole = server.post("/v1/chat/completions", _chat("import os"))
    assert whole["usage"]["completion_tokens"] == 24
    with server.open("/v1/chat/completions", _chat("import os", stream=True)) as response:
        events = [
            line[6:] for line in response.read().decode().splitlines() if line[:6] == "data: "
        ]
    assert events.pop() == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert text == whole["choices"][0]["message"]["content"]
    assert len(choices) > 4


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_a_token_limit_inside_an_accepted_run_cuts_it(server, completions, length):
    for prompt, wanted in completions[:4]:
        answer = server.complete(prompt, max_new_tokens=length)
        assert answer["output_ids"] == wanted[:length]


def test_a_stop_token_inside_an_accepted_run_ends_the_text(server, completions):
    for prompt, wanted in completions[:4]:
        at = next(index for index in STOP_RANGE if wanted[index] not in wanted[:index])
        answer = server.complete(prompt, stop_token_ids=[wanted[at]], ignore_eos=False)
        assert answer["output_ids"] == wanted[: at + 1]
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_log_probabilities_do_not_depend_on_speculation(server, completions):
    prompt, wanted = completions[0]
    parameters = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": parameters, "return_logprob": True}
    fast = server.post("/generate", body)["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in fast] == wanted[:16]
    for index in (1, 6, 15):
        longer = {**body, "input_ids": prompt + wanted[:index]}
        longer["sampling_params"] = {**parameters, "max_new_tokens": 1}
        ((alone, token, _),) = server.post("/generate", longer)["meta_info"][
            "output_token_logprobs"
        ]
        assert (token, alone) == (wanted[index], pytest.approx(fast[index][0], abs=1e-4))


def test_structured_output_keeps_to_its_grammar(server):
    answer = server.complete([5, 9, 300], regex=r"[0-9]{3}-[a-f]{4}", ignore_eos=False)
    assert len(answer["text"]) == 8
    number, letters = answer["text"].split("-")
    assert number.isdigit()
    assert set(letters) <= set("abcdef")


def test_logit_bias_is_honoured_at_every_position(server):
    parameters = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    body = {"input_ids": [7, 8], "sampling_params": {**parameters, "logit_bias": {"77": 1000.0}}}
    assert server.post("/generate", body)["output_ids"] == [77] * 12


def test_a_request_may_reach_the_context_limit(server, request, policies):
    # SGLang holds back as many positions as all branches of one draft may take, and some.
    name, _ = request.node.callspec.params["server"]
    limits = load_policy_file(policies[name]).build().limits
    room = 30 + limits.topk * limits.num_steps
    random_ids = random.Random(1)
    prompt = [random_ids.randrange(2, 1024) for _ in range(CONTEXT_LENGTH - room)]
    assert len(server.complete(prompt, max_new_tokens=30)["output_ids"]) == 30
    with pytest.raises(urllib.error.HTTPError, match="400"):
        server.complete(prompt, max_new_tokens=room + 1)


def test_a_prefix_hit_changes_nothing(server, completions):
    prompt, wanted = max(completions, key=lambda pair: len(pair[0]))
    answer = server.complete(prompt + wanted[:8], max_new_tokens=16)
    assert answer["meta_info"]["cached_tokens"] > 0
    assert answer["output_ids"] == wanted[8:24]


def test_aborts_and_finishes_among_running_requests_leak_nothing(
    server, fork_server, pair, completions
):
    texts = fork_server.call(
        "hugging_face", "decode", str(pair / "target"), [text for _, text in completions]
    )
    known = [
        Known(prompt=prompt, completion=completion, text=text)
        for (prompt, completion), text in zip(completions, texts, strict=True)
    ]
    found = soak(server, known, num_requests=80, concurrency=8, seed=2)
    assert found["wrong"] == []
    assert found["contradictions"] == []
    assert (found["num_used_tokens"], found["num_running_reqs"]) == (0, 0)
    kinds = {outcome.split(":")[0] for outcome in found["outcomes"]}
    assert kinds == set(KINDS)
    assert "leak" not in server.log.read_text(encoding="utf-8", errors="replace").lower()


def test_sampled_tokens_have_the_targets_distribution(fork_server, pair, server):
    prompt, temperature, top_k, num_samples = [11, 42, 360], 1.5, 4, 1200
    arguments = (str(pair / "target"), prompt, 3, temperature, top_k)
    paths = fork_server.call("hugging_face", "weigh_continuations", *arguments)
    expected = {tuple(path): probability for path, probability in paths}
    parameters = {
        "temperature": temperature,
        "top_k": top_k,
        "max_new_tokens": 3,
        "ignore_eos": True,
        "n": 40,
    }
    body = {"input_ids": prompt, "sampling_params": parameters}
    found = Counter()
    for _ in range(num_samples // 40):
        found.update(tuple(answer["output_ids"]) for answer in server.post("/generate", body))
    assert found.keys() <= expected.keys()
    # Cells that chance would rarely fill are joined, as the statistic asks.
    common = [path for path, probability in expected.items() if num_samples * probability >= 5]
    cells = [(found[path], num_samples * expected[path]) for path in common]
    rest = num_samples * (1 - sum(expected[path] for path in common))
    if len(common) < len(expected):
        cells.append((num_samples - sum(seen for seen, _ in cells), rest))
    statistic = sum((seen - count) ** 2 / count for seen, count in cells)
    degrees = len(cells) - 1
    # Wilson and Hilferty: 4.3 deviations, one false alarm in a hundred thousand runs.
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 4.3 * math.sqrt(2 / (9 * degrees))) ** 3
