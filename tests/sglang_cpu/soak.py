"""Requests of every kind at once, some ended by their client, and what must hold afterwards."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from server_metrics import contradictions, read_metrics

KINDS = ("greedy", "stop string", "stop token", "sampled", "grammar", "abort", "hang up")
"""Of these, the last two are ended by the client: by SGLang's call, and by closing the stream."""
WEIGHTS = (4, 2, 2, 3, 1, 5, 3)
SAMPLING = {"temperature": 0.9, "top_p": 0.95, "top_k": 40}
GRAMMAR = r"[0-9]{2,6}"
MOST_EVENTS = 6
"""A client that ends its request has read fewer events of it; with none, it may still wait."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """A prompt whose greedy completion is known.

    Attributes:
        prompt, completion: Token ids.
        text: The completion's text.
    """

    prompt: list[int]
    completion: list[int]
    text: str


@dataclass(frozen=True, kw_only=True)
class Order:
    """One request: which prompt, what kind, how long, and when its client gives up."""

    index: int
    kind: str
    known: Known
    length: int
    num_events: int
    seed: int


def soak(server, known, *, num_requests, concurrency, seed, say=lambda _: None):
    """Send requests and wait until the server is idle.

    Args:
        server: A `Server` with metrics.
        known: `Known` prompts to draw from.
        num_requests: How many.
        concurrency: How many at a time.
        seed: Decides kinds, prompts, lengths and aborts.
        say: Called with a line of progress now and then.

    Returns:
        What was sent and found: `outcomes` counts kinds with how they ended, `wrong` lists
        requests whose output is not what it must be, `num_used_tokens` are cache slots after all
        are over, `contradictions` of the counters.
    """
    orders = draw_orders(known, num_requests, seed)
    before = read_metrics(server)
    outcomes, wrong, num_done = Counter(), [], 0
    with ThreadPoolExecutor(concurrency) as pool:
        for order, (ending, fault) in zip(
            orders, pool.map(lambda order: _send(server, order), orders), strict=True
        ):
            outcomes[f"{order.kind}: {ending}"] += 1
            if fault is not None:
                wrong.append({"request": order.index, "kind": order.kind, "fault": fault})
            num_done += 1
            if num_done % 50 == 0:
                say(f"{num_done} of {num_requests} requests, {len(wrong)} wrong")
    load = server.drain()
    # The last step is counted when the next one begins, or when the scheduler finds nothing to do.
    time.sleep(1)
    return {
        "num_requests": num_requests,
        "concurrency": concurrency,
        "seed": seed,
        "outcomes": dict(sorted(outcomes.items())),
        "wrong": wrong,
        "num_running_reqs": load["num_running_reqs"],
        "num_waiting_reqs": load["num_waiting_reqs"],
        "num_used_tokens": load["num_used_tokens"],
        "contradictions": contradictions(before, read_metrics(server)),
    }


def draw_orders(known, num_requests, seed):
    """The requests that a seed stands for."""
    choose = random.Random(seed)
    return [
        Order(
            index=index,
            kind=choose.choices(KINDS, WEIGHTS)[0],
            known=choose.choice(known),
            length=choose.randrange(1, len(known[0].completion) + 1),
            num_events=choose.randrange(MOST_EVENTS),
            seed=choose.randrange(1 << 30),
        )
        for index in range(num_requests)
    ]


def _send(server, order):
    """How a request ended, and what is wrong with it, or None."""
    sampling = {"temperature": 0, "max_new_tokens": order.length, "ignore_eos": True}
    if order.kind in {"abort", "hang up"}:
        return _give_up(server, order, sampling)
    send = {
        "greedy": _greedy,
        "stop string": _stop_string,
        "stop token": _stop_token,
        "sampled": _sampled,
        "grammar": _grammar,
    }[order.kind]
    return send(server, order, sampling)


def _ask(server, order, sampling):
    body = {"input_ids": order.known.prompt, "sampling_params": sampling}
    answer = server.post("/generate", body)
    return answer, answer["meta_info"]["finish_reason"]["type"]


def _greedy(server, order, sampling):
    answer, ending = _ask(server, order, sampling)
    return ending, _compare(answer["output_ids"], order.known.completion[: order.length])


def _stop_string(server, order, sampling):
    # From the middle of the known text, so that it is met, often inside an accepted run.
    text = order.known.text
    middle = len(text) // 2
    stop = text[middle : middle + 4]
    length = len(order.known.completion)
    answer, ending = _ask(server, order, {**sampling, "max_new_tokens": length, "stop": [stop]})
    return ending, _compare(answer["text"], text.split(stop, 1)[0])


def _stop_token(server, order, sampling):
    completion = order.known.completion
    token = completion[order.length - 1]
    wanted = completion[: completion.index(token) + 1]
    # ignore_eos would have SGLang pass over stop tokens too.
    sampling |= {"stop_token_ids": [token], "ignore_eos": False}
    answer, ending = _ask(server, order, {**sampling, "max_new_tokens": len(completion)})
    found = answer["output_ids"]
    if ending == "stop" and found != wanted and found == completion[: len(found)]:
        return "end of text", None
    return ending, _compare(found, wanted)


def _sampled(server, order, sampling):
    answer, ending = _ask(server, order, sampling | SAMPLING | {"sampling_seed": order.seed})
    return ending, _compare(len(answer["output_ids"]), order.length)


def _grammar(server, order, sampling):
    sampling |= {"regex": GRAMMAR, "ignore_eos": False}
    answer, ending = _ask(server, order, sampling)
    return ending, None if answer["text"].isdigit() else f"not digits: {answer['text']!r}"


def _give_up(server, order, sampling):
    rid = f"soak-{order.seed}-{order.index}"
    length = len(order.known.completion)
    body = {
        "rid": rid,
        "input_ids": order.known.prompt,
        "sampling_params": {**sampling, "max_new_tokens": length},
        "stream": True,
    }
    with server.open("/generate", body) as response:
        found = _read_events(response, order.num_events)
        ending = "closed"
        if order.kind == "abort":
            with server.open("/abort_request", {"rid": rid}):
                found = _read_events(response, length + 1) or found
            ending = "aborted" if len(found) < length else "too late"
    # SGLang cuts what an abort finds in flight at no token limit.
    return ending, _compare(found[:length], order.known.completion[: len(found)])


def _read_events(response, count):
    """Tokens of the last of at most `count` events, empty where none came."""
    found = []
    for line in response if count else ():
        if line.startswith(b"data: {"):
            found = json.loads(line[6:]).get("output_ids", found)
            count -= 1
        if count == 0:
            break
    return found


def _compare(found, wanted):
    return None if found == wanted else f"{found!r} instead of {wanted!r}"
