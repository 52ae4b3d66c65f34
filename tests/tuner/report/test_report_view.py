"""Tables and cards: what the template prints, computed by hand here."""

from typing import Any

import pytest

from sgl_eagle_tuner.report import evidence_view, speed_view
from sgl_eagle_tuner.report.base import Estimate
from sgl_eagle_tuner.report.data import DemoReport, StageTime
from sgl_eagle_tuner.report.format import MICRO, MINUS, NARROW_SPACE, TIMES
from sgl_eagle_tuner.report.speed import PolicySetting, SettingResult, StepTimeSplit, WorkloadResult
from sgl_eagle_tuner.report.table import Table

PLAIN = PolicySetting(name="plain", kind="plain")
TREE = PolicySetting(name="tree", kind="price", num_steps=6, topk=4, num_draft_tokens=24)


def rows_of(table: Table) -> dict[str, list[str]]:
    return {
        row.head: [cell.text.replace(NARROW_SPACE, " ") for cell in row.cells]
        for group in table.groups
        for row in group.rows
    }


def with_settings(report: DemoReport, *settings: SettingResult) -> DemoReport:
    result = WorkloadResult(
        workload="chat", recommended=settings[0].role, reason="", settings=settings
    )
    return report.model_copy(update={"workloads": (result,)})


def speed_setting(role: str, name: str, **fields: Any) -> SettingResult:
    return SettingResult(role=role, policy=TREE.model_copy(update={"name": name}), **fields)


def test_prediction_error_is_signed() -> None:
    both = speed_setting(
        "tuned",
        "t",
        measured_tok_per_s=Estimate(value=40.0),
        predicted_tok_per_s=Estimate(value=42.0),
    )
    assert speed_view.prediction_error(both) == pytest.approx(0.05)
    assert speed_view.prediction_error(speed_setting("tuned", "t")) is None
    still = both.model_copy(update={"measured_tok_per_s": Estimate(value=0.0)})
    assert speed_view.prediction_error(still) is None


def test_speed_table_holds_gains_and_error(bare_report: DemoReport) -> None:
    report = with_settings(
        bare_report,
        speed_setting(
            "tuned",
            "t",
            measured_tok_per_s=Estimate(value=40.0, low=38.0, high=42.0),
            predicted_tok_per_s=Estimate(value=38.0),
            gain_over_plain=Estimate(value=1.6, low=1.5, high=1.7),
        ),
    )
    table = speed_view.speed_table(report)
    assert rows_of(table) == {
        "tuned 6/4/24": ["40.0", "38.0", f"{MINUS}5.0 %", f"1.60{TIMES}", "not measured"]
    }
    assert table.groups[0].rows[0].cells[0].small == "38.0 to 42.0"
    assert table.groups[0].rows[0].strong


def test_decisions_are_compared_with_the_tuned_policy(bare_report: DemoReport) -> None:
    report = with_settings(
        bare_report,
        speed_setting(
            "tuned",
            "t",
            measured_tok_per_s=Estimate(value=50.0),
            predicted_tok_per_s=Estimate(value=40.0),
        ),
        speed_setting("variant", "no stop", measured_tok_per_s=Estimate(value=49.0)),
        speed_setting("variant", "no prune", predicted_tok_per_s=Estimate(value=41.0)),
        speed_setting("variant", "no width"),
    )
    table = speed_view.decision_table(report)
    assert table.columns == ("workload", "no stop", "no prune", "no width")
    assert rows_of(table) == {"chat": [f"{MINUS}2.0 %", "+2.5 %", "not measured"]}
    assert [cell.small for cell in table.groups[0].rows[0].cells] == ["measured", "predicted", ""]


def test_no_variants_no_decision_table(bare_report: DemoReport) -> None:
    assert speed_view.decision_table(bare_report).groups == ()


def test_step_table_adds_what_was_measured(bare_report: DemoReport) -> None:
    split = StepTimeSplit(draft_us=4_000.0, verify_us=40_000.0, decide_us=500.0)
    report = with_settings(bare_report, speed_setting("tuned", "t", step_time=split))
    cells = rows_of(speed_view.step_table(report))["tuned 6/4/24"]
    assert cells == [
        "not measured",
        "4.0 ms",
        f"500 {MICRO}s",
        "40.0 ms",
        "not measured",
        "44.5 ms",
    ]


def test_plain_decoding_has_no_accept_rate(bare_report: DemoReport) -> None:
    report = with_settings(bare_report, SettingResult(role="plain", policy=PLAIN))
    cells = rows_of(speed_view.accept_table(report))["plain decoding"]
    assert cells[1] == "\N{EN DASH}"
    assert cells[0] == "not measured"


def test_stages_add_up(bare_report: DemoReport) -> None:
    stages = (StageTime(name="tune", seconds=90.0), StageTime(name="render", seconds=30.0))
    table = evidence_view.stage_table(bare_report.model_copy(update={"stages": stages}))
    assert rows_of(table) == {
        "tune": ["1 min 30 s", "75 %", ""],
        "render": ["30.0 s", "25 %", ""],
        "all stages": ["2 min 00 s", "100 %", ""],
    }
    shares = [row.cells[0].share for row in table.groups[0].rows]
    assert shares == [100.0, pytest.approx(100 / 3), None]


def test_search_table_names_the_best_baseline(full_report: DemoReport) -> None:
    study = full_report.searches[0]
    feasible = [t for t in study.trials if t.time_per_token_us is not None]
    cells = rows_of(evidence_view.search_table([study]))[study.workload]
    assert cells[0] == "200"
    assert cells[1] == str(200 - len(feasible))
    table = evidence_view.search_table([study])
    assert table.groups[0].rows[0].cells[3].small == "best static"


def test_a_difference_without_excuse_stands_out(full_report: DemoReport) -> None:
    good = full_report.correctness[0]
    bad = good.model_copy(update={"num_equal": good.num_equal - 2})
    report = full_report.model_copy(update={"correctness": (good, bad)})
    table = evidence_view.correctness_table(report)
    assert [row.strong for row in table.groups[0].rows] == [False, True]
    assert [row.cells[-1].text for row in table.groups[0].rows] == ["0", "2"]


def test_calibration_scores_stand_side_by_side(full_report: DemoReport) -> None:
    result = full_report.calibrations[0]
    assert result.before is not None
    assert result.before.ece is not None
    cells = rows_of(evidence_view.calibration_table([result]))["all"]
    assert cells[0] == "isotonic"
    assert cells[1] == f"{result.before.ece:.3f}"
    assert cells[5:7] == ["0.930", "0.930"]


def test_provenance_names_what_was_not_recorded(bare_report: DemoReport) -> None:
    facts = dict(evidence_view.provenance_rows(bare_report))
    assert facts["threads"] == "not recorded"
    assert facts["target"] == "target, sha256 not recorded"
    assert facts["engine"] == "reference engine"


def test_every_workload_has_a_card(full_report: DemoReport) -> None:
    cards = speed_view.recommendation_cards(full_report)
    assert [card.workload for card in cards] == ["chat", "code", "math", "summary", "qa"]
    assert cards[-1].policy == "best static 4/2/6"
    assert cards[-1].flags[0] == "--speculative-algorithm EAGLE3"
    assert cards[0].flags[-1] == "--sgl-eagle-policy policy.json"
