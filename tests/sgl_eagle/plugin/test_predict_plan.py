"""What a server without a policy file is predicted to choose on an H200, as the docs quote it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sgl_eagle.plugin.builtin_policy import builtin_plan, load_prior
from sgl_eagle.plugin.predict_plan import TYPICAL_CONTEXT, main, modelled_us
from sgl_eagle.plugin.server_arguments import DEFAULT_LIMITS
from sgl_eagle_harness.cost_file import load_cost_file

ROOT = Path(__file__).parents[3]
COST = ROOT / "reports/cost/2026-11-30-h200-inflated-sglang.json"
SERVING = ROOT / "reports/serving/2026-11-30-h200-inflated.json"


def predicted(capsys, *flags, cost=COST, serving=SERVING):
    assert main(["--cost", str(cost), "--serving", str(serving), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.split() for line in lines[2:-1]], lines[-1]


@pytest.mark.parametrize("flags", [(), ("--extends-in-graphs",)], ids=["as-measured", "in-graphs"])
def test_few_requests_are_drafted_for_and_many_are_not(capsys, flags):
    rows, _ = predicted(capsys, *flags)
    assert [row[0] for row in rows] == ["1", "4", "16", "64", "128"]
    for concurrency, first, learnt, accept_length, _, of_plain in rows:
        drafts = int(concurrency) < 64
        assert (first != "plain", learnt != "plain") == (drafts, drafts)
        assert (float(accept_length) > 1) == (float(of_plain) > 1) == drafts


def test_a_table_of_single_rounds_takes_longer_than_serving_does(capsys):
    assert main(["--cost", str(COST), "--serving", str(SERVING), "--times"]) == 0
    _, _, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows[:2]] == [["1", "plain"], ["1", "5/4/8"]]
    assert len(rows) == 2 * 5
    for _, _, table_ms, served_ms, ratio in rows:
        assert 1 < float(ratio) == pytest.approx(float(table_ms) / float(served_ms), abs=0.01)


@pytest.mark.parametrize(
    ("backend", "engine"), [("triton", "sgl-eagle2"), ("fa3", "sgl-eagle2@fa3")]
)
def test_the_docs_quote_how_near_rows_of_rounds_are_to_served_ones(capsys, backend, engine):
    cost = ROOT / f"reports/cost/2026-11-30-h200-inflated-rows-{backend}.json"
    serving = ROOT / "reports/serving/2026-11-30-h200-inflated-rows.json"
    flags = ["--cost", str(cost), "--serving", str(serving), "--drafting", engine]
    assert main([*flags, "--times"]) == 0
    _, _, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    text = (ROOT / "docs/sglang.md").read_text()
    for kind, is_quoted in (("plain", backend == "triton"), ("5/4/8", True)):
        cells = [f"{row[2]} / {row[3]}" for row in rows if row[1] == kind]
        assert (f"| {' | '.join(cells)} |" in text) == is_quoted
    assert all(0.95 <= float(row[4]) <= 1.05 for row in rows)


def test_the_docs_quote_what_larger_limits_would_bring(capsys):
    serving = ROOT / "reports/serving/2026-11-30-h200-inflated-planned.json"
    text = " ".join((ROOT / "docs/sglang.md").read_text().split())
    for limits in (("6", "4", "32"), ("5", "4", "16")):
        cost = ROOT / f"reports/cost/2026-11-30-h200-inflated-limits-{'-'.join(limits)}.json"
        rows, _ = predicted(capsys, "--limits", *limits, cost=cost, serving=serving)
        speeds = [row[4] for row in rows]
        assert f"{speeds[0]}, {speeds[1]} and {speeds[2]}" in text
        assert rows[0][1] == "/".join(limits)


def test_the_docs_quote_the_prediction(capsys):
    rows, last = predicted(capsys, "--extends-in-graphs", "--limits", "5", "4", "16")
    text = (ROOT / "docs/sglang.md").read_text()
    for row in rows:
        assert f"| {' | '.join(row)} |" in text
    assert last.split(": ")[1].split(" of")[0] in text


def test_plain_rounds_tell_the_schedulers_time_where_the_table_tells_what_is_launched():
    costs = load_cost_file(ROOT / "reports/cost/2026-11-30-h200-inflated-rows-triton.json")
    table = costs.to_table()
    launch = replace(table.target, kind="launch", us=np.full(table.target.us.shape, 900.0))
    plan = builtin_plan(DEFAULT_LIMITS, replace(table, launch=launch), load_prior())
    row_us = plan.shape_us(4, TYPICAL_CONTEXT)
    plain_us = float(row_us[0])
    as_in_a_row = modelled_us(plan, 4, served_plain_us=1.05 * plain_us)
    assert as_in_a_row.tolist() == row_us.tolist()
    found = modelled_us(plan, 4, served_plain_us=2 * plain_us)
    assert found[0] == pytest.approx(2 * plain_us)
    assert found.tolist() == np.maximum(row_us, found[0]).tolist()  # all are launched alike
    silent = builtin_plan(DEFAULT_LIMITS, table, load_prior())
    assert modelled_us(silent, 4, served_plain_us=2 * plain_us).tolist() == row_us.tolist()
