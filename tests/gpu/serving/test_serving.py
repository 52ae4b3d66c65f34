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
                {"engine": "sglang", "concurrency": 1, "tok_per_s": 400.0} | row,
                {"engine": "sgl-plain", "concurrency": 4, "tok_per_s": 900.0} | row,
            ],
        }
    )
    assert "FAILED sgl-price: start: ended" in text
    assert "400 (2.50)" in text
    assert text.count("not measured") == 2
