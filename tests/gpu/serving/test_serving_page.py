"""The report of a serving check: numbers by hand, and a page that leaves nothing out."""

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from serving_page import render_page
from serving_summary import best_builtin, losses, plain_like, ratios, summarize_speeds


def row(engine, concurrency, full, *, whole=50.0, accept=1.0, host_us=None):
    return {
        "engine": engine,
        "repeat": 0,
        "concurrency": concurrency,
        "num_requests": 4,
        "num_tokens": 100,
        "tok_per_s": whole,
        "tokens_per_verify": accept,
        "full_tok_per_s": full,
        "host_us": host_us,
    }


TIMING = [
    row("sglang", 1, 200.0),
    row("sglang", 1, 220.0),
    row("eagle3-3-1-4", 1, 300.0, accept=2.0),
    row("eagle3-5-4-8", 1, 400.0, accept=3.0),
    row("sgl-eagle2", 1, 380.0, accept=3.0, host_us="batch 1.0, host us a round: verify 5"),
    row("sglang", 16, None, whole=1000.0),
    row("eagle3-3-1-4", 16, 900.0, accept=2.0),
    row("sgl-eagle2", 16, 960.0, accept=3.0),
]


def test_speeds_are_medians_of_repeats_and_give_the_time_of_a_step():
    speeds = summarize_speeds(TIMING)
    plain = speeds["sglang", 1]
    assert (plain.tok_per_s, plain.lowest, plain.highest, plain.num_repeats) == (210, 200, 220, 2)
    assert speeds["eagle3-5-4-8", 1].step_ms == pytest.approx(7.5)
    whole = speeds["sglang", 16]
    assert (whole.tok_per_s, whole.is_whole_run) == (1000.0, True)


def test_the_best_builtin_is_chosen_for_each_concurrency():
    speeds = summarize_speeds(TIMING)
    assert best_builtin(speeds, "sgl-eagle2", 1) == "eagle3-5-4-8"
    assert best_builtin(speeds, "sgl-eagle2", 16) == "eagle3-3-1-4"
    assert best_builtin(speeds, "sgl-eagle2", 4) is None
    against = ratios(speeds, partial(best_builtin, speeds))
    assert against["sgl-eagle2", 1] == pytest.approx(0.95)
    assert ratios(speeds, lambda *_: "absent") == {}


def test_another_attention_backend_is_compared_with_its_own_baselines():
    timing = [
        *TIMING,
        row("sglang@fa3", 1, 250.0),
        row("eagle3-3-1-4@fa3", 1, 320.0, accept=2.0),
        row("sgl-eagle2@fa3", 1, 240.0, accept=3.0),
    ]
    speeds = summarize_speeds(timing)
    assert best_builtin(speeds, "sgl-eagle2@fa3", 1) == "eagle3-3-1-4@fa3"
    assert ratios(speeds, plain_like)["sgl-eagle2@fa3", 1] == pytest.approx(0.96)
    found = [loss[:3] for loss in losses(speeds) if loss[0] == "sgl-eagle2@fa3"]
    assert found == [
        ("sgl-eagle2@fa3", 1, "eagle3-3-1-4@fa3"),
        ("sgl-eagle2@fa3", 1, "sglang@fa3"),
    ]


def test_losses_are_named_worst_first():
    assert losses(summarize_speeds(TIMING)) == [
        ("sgl-eagle2", 1, "eagle3-5-4-8", pytest.approx(0.95)),
        ("sgl-eagle2", 16, "sglang", pytest.approx(0.96)),
    ]


def test_the_page_shows_what_was_measured_and_what_was_not():
    results = {
        "provenance": {
            "gpu": "a <GPU>",
            "versions": {"sglang": "0.5.17"},
            "commit": "abc",
            "date": "2026-11-30",
            "command": "python check_serving.py",
        },
        "failures": {"sgl-price": "start: ended"},
        "unfinished": ["sgl-chain: greedy at batch 1"],
        "prompt_tokens": [7, 40],
        "timing": TIMING,
        "start_s": {"sglang": 50.0},
        "capture_s": {"sglang": {"target decode": 2.5}},
        "equality": [
            {
                "engine": "sgl-eagle2",
                "batch": 8,
                "num_prompts": 64,
                "num_equal": 61,
                "num_near_ties": 2,
                "gaps": [0.0, 0.125, 0.375],
            }
        ],
    }
    page = render_page(results, "A title")
    for text in (
        "a &lt;GPU&gt;",
        "<b>sgl-price failed:</b> start: ended",
        "Not finished at the deadline:</b> sgl-chain: greedy at batch 1",
        "1000*",
        "3.00, 7.50 ms",
        "<td>sgl-eagle2</td><td>1</td><td>eagle3-5-4-8</td><td>0.95</td>",
        "host us a round: verify 5",
        "target decode 2.5",
        "<td>64</td><td>61</td><td>2</td><td>1</td><td>0.375</td>",
        "2 prompts of 7 to 40 tokens",
    ):
        assert text in page, text
    assert page.count("<svg") == 3
    assert page.count("not measured") == 4  # one speed, its two ratios, one engine's memory
    only_failures = {key: results[key] for key in ("provenance", "failures")}
    assert "<h2>" not in render_page(only_failures, "A title")
