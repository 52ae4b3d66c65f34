"""The serving check on a small pair: all policies, CUDA graphs, float32."""

import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
sys.path.insert(0, str(FOLDER.parents[1] / "sglang_cpu"))


@pytest.mark.gpu
@pytest.mark.sglang
@pytest.mark.slow
def test_every_policy_serves_what_plain_sglang_serves(tmp_path):
    import check_serving
    import tiny_pair

    tiny_pair.make_pair(tmp_path)
    words = f"--target {tmp_path / 'target'} --draft {tmp_path / 'draft'} --out {tmp_path / 'out'}"
    small = "--dtype float32 --num-equal 16 --batches 1 8 --concurrencies 1 8 --repeats 1"
    check_serving.main([*words.split(), *small.split()])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["failures"] == {}
    for row in results["equality"]:
        assert len(row["gaps"]) == row["num_near_ties"], row
    drafting = {"sgl-static", "sgl-eagle2"}
    accepted = {row["engine"] for row in results["equality"] if row["tokens_per_verify"] > 1}
    assert drafting <= accepted
    for row in results["sampling"]:
        assert row["p_value"] > 1e-4, row


@pytest.mark.gpu
@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "fa3"])
def test_texts_that_fill_the_context_are_those_of_plain_sglang(backend, tmp_path):
    import check_serving
    import tiny_pair

    tiny_pair.make_pair(tmp_path)
    words = f"--target {tmp_path / 'target'} --draft {tmp_path / 'draft'} --out {tmp_path / 'out'}"
    # A full batch, so that the lists of all requests are full.
    short = "--context-length 96 --equal-tokens 0 --batches 1 8 --max-running-requests 8"
    few = "--num-equal 32 --num-samples 0 --concurrencies 8 --repeats 0"
    engines = "--engines sglang sgl-plain sgl-eagle2 sgl-price sgl-default"
    flags = f"--dtype {'float32' if backend == 'triton' else 'bfloat16'} --backend {backend}"
    words = f"{words} {short} {few} {engines} {flags}"
    assert check_serving.main(words.split()) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results["equality"]) == 2 * 5


def test_samples_of_one_distribution_are_told_from_those_of_two():
    from collections import Counter

    import numpy as np
    from two_samples import homogeneity

    draw = np.random.default_rng(0)

    def sample(probs):
        return Counter(draw.choice(len(probs), 4000, p=probs).tolist())

    even, uneven = [0.25] * 4, [0.3, 0.2, 0.25, 0.25]
    assert homogeneity(sample(even), sample(even))["p_value"] > 1e-4
    assert homogeneity(sample(even), sample(uneven))["p_value"] < 1e-6


def test_rare_outcomes_are_counted_together():
    from collections import Counter

    from two_samples import homogeneity

    first = Counter({"a": 500, "b": 500} | {f"x{i}": 1 for i in range(20)})
    second = Counter({"a": 500, "b": 500} | {f"y{i}": 1 for i in range(20)})
    result = homogeneity(first, second)
    assert result["num_outcomes"] == 3
    assert result["chi_square"] == pytest.approx(0)
    with pytest.raises(ValueError, match="two outcomes"):
        homogeneity(Counter("a"), Counter("a"))


def test_tables_say_what_was_not_measured():
    from report_tables import render_tables

    row = {"repeat": 0, "num_tokens": 9, "tokens_per_verify": 2.5, "host_us": None}
    text = render_tables(
        {
            "failures": {"sgl-price": "start: ended"},
            "timing": [
                row
                | {"engine": "sglang", "concurrency": 1, "tok_per_s": 400, "full_tok_per_s": None},
                row
                | {"engine": "sgl-plain", "concurrency": 4, "tok_per_s": 7, "full_tok_per_s": 8},
            ],
        }
    )
    assert "FAILED sgl-price: start: ended" in text
    assert "400 (2.50)" in text
    assert "8 (2.50)" in text
    assert text.count("not measured") == 5


def test_speeds_are_read_where_all_requests_decode():
    from serving_log import read_log

    def decode(running, speed, more="x"):
        line = f"Decode batch, #running-req: {running}, {more}"
        return f"{line}, gen throughput (token/s): {speed}, y"

    log = [
        "Prefill batch, #new-seq: 8",
        decode(8, 1.0),
        decode(8, 100.0),
        "INFO SGL_EAGLE batch 8.0, host us a round: decide 3, verify 5; own 3",
        decode(8, 300.0, "accept len: 3.00"),
        *["INFO SGL_EAGLE batch 8.0, host us a round: decide 5, verify 5; own 5"] * 2,
        "INFO SGL_EAGLE batch 8.0, host us a round: decide 3, verify 5, watch 24; own 27",
        "Prefill batch, #new-seq: 1",
        decode(8, 2.0),
        decode(8, 200.0, "accept len: 1.00"),
        "INFO SGL_EAGLE batch 7.9, host us a round: decide 4, verify 9; own 4",
        decode(7, 3.0),
        decode(8, 4.0),
    ]
    found = read_log("\n".join(log), 8)
    assert found["full_tok_per_s"] == pytest.approx((1 + 3 + 1) / (1 / 100 + 3 / 300 + 1 / 200))
    assert found["host_us"] == "batch 8.0, host us a round: decide 5, verify 5; own 5"
    assert found["own_us"] == 10.0
    assert found["num_speeds"] == 3
    nothing = {"full_tok_per_s": None, "num_speeds": 0, "host_us": None, "own_us": None}
    assert read_log("", 8) == nothing


def test_graph_captures_are_added_up_by_kind():
    from serving_log import read_capture_seconds

    log = (
        "Capture target verify CUDA graph end. elapsed=2.50 s, mem usage=1.00 GB\n"
        "Capture draft extend CUDA graph end. elapsed=1.00 s, mem usage=0.10 GB\n"
        "Capture target verify CUDA graph end. elapsed=0.50 s, mem usage=0.20 GB\n"
    )
    assert read_capture_seconds(log) == {"target verify": 3.0, "draft extend": 1.0}
