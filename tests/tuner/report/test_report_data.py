"""Report data: round trip, refusals, whole files."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from sgl_eagle_harness.errors import OutputError, ReportError
from sgl_eagle_tuner.report.analysis import CorrectnessCheck, CostCurve, Marginal
from sgl_eagle_tuner.report.base import Estimate
from sgl_eagle_tuner.report.data import DemoReport, load_report, save_report
from sgl_eagle_tuner.report.speed import PolicySetting, SettingResult, WorkloadResult
from sgl_eagle_tuner.report.trees import DrawnTree, TreeNode


def test_every_field_survives_the_json_file(full_report: DemoReport, tmp_path: Path) -> None:
    save_report(full_report, tmp_path / "new folder" / "report.json")
    assert load_report(tmp_path / "new folder" / "report.json") == full_report


def test_every_field_is_documented() -> None:
    schema = DemoReport.model_json_schema()
    undocumented = [
        f"{name}.{field}"
        for name, model in {"DemoReport": schema, **schema["$defs"]}.items()
        for field, spec in model["properties"].items()
        if not spec.get("description")
    ]
    assert undocumented == []


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"cannot read .*gone\.json"):
        load_report(tmp_path / "gone.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, r"report\.json: schema_version must be 1, got schema_version=2"),
        ({"colour": "red"}, r"report\.json: colour: Extra inputs are not permitted"),
        ({"workloads": []}, r"report\.json: workloads: .*at least 1 item"),
        ({"title": None}, r"report\.json: title: Input should be a valid string"),
    ],
)
def test_a_bad_field_is_named(
    bare_report: DemoReport, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    data = json.loads(bare_report.model_dump_json()) | change
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(ReportError, match=message):
        load_report(tmp_path / "report.json")


def test_a_truncated_file_is_refused(bare_report: DemoReport, tmp_path: Path) -> None:
    text = bare_report.model_dump_json()
    (tmp_path / "report.json").write_text(text[: len(text) // 2])
    with pytest.raises(ReportError, match=r"report\.json is not JSON"):
        load_report(tmp_path / "report.json")


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ReportError, match=r"report\.json is not JSON"):
        load_report(tmp_path / "report.json")


def test_nan_is_refused(bare_report: DemoReport, tmp_path: Path) -> None:
    data = json.loads(bare_report.model_dump_json())
    data["overall"]["gain_over_plain"] = {"value": float("nan")}
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(ReportError, match=r"overall\.gain_over_plain\.value: .*finite number"):
        load_report(tmp_path / "report.json")


def test_an_unwritable_place_is_named(bare_report: DemoReport, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*report\.json"):
        save_report(bare_report, tmp_path / "file" / "report.json")


def test_half_an_interval_is_refused() -> None:
    with pytest.raises(ValidationError, match="low and high must both be given"):
        Estimate(value=1.0, low=0.5)


def test_an_upside_down_interval_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"low must not exceed high, got low=2\.0"):
        Estimate(value=1.0, low=2.0, high=0.5)


def _setting(role: str) -> SettingResult:
    return SettingResult(role=role, policy=PolicySetting(name=role, kind="plain"))


def test_a_role_occurs_once_a_workload() -> None:
    with pytest.raises(ValidationError, match=r"more than one of \['tuned'\]"):
        WorkloadResult(
            workload="chat",
            recommended="tuned",
            reason="",
            settings=[_setting("tuned"), _setting("tuned")],
        )


def test_the_recommended_role_must_be_there() -> None:
    with pytest.raises(ValidationError, match=r"recommends 'tuned'.*allowed: \['plain'\]"):
        WorkloadResult(
            workload="chat", recommended="tuned", reason="", settings=[_setting("plain")]
        )


def test_a_variant_cannot_be_recommended() -> None:
    with pytest.raises(ValidationError, match="recommends 'variant'"):
        WorkloadResult(
            workload="chat", recommended="variant", reason="", settings=[_setting("variant")]
        )


def test_lines_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValidationError, match="num_tokens has 2 values, median_us 1"):
        CostCurve(part="draft", batch_size=1, context_len=0, num_tokens=[1, 2], median_us=[1.0])
    with pytest.raises(ValidationError, match="must have equal lengths, got 1, 1, 0"):
        Marginal(param="topk", values=["1"], best_us=[1.0], median_us=[])


def test_a_check_counts_no_more_than_it_compared() -> None:
    with pytest.raises(ValidationError, match=r"got 9 \+ 2 > 10"):
        CorrectnessCheck(
            name="", setting="", unit="steps", num_compared=10, num_equal=9, num_near_ties=2
        )
    check = CorrectnessCheck(
        name="", setting="", unit="steps", num_compared=10, num_equal=7, num_near_ties=2
    )
    assert check.num_different == 1


def _tree(states: list[tuple[int, str]], num_draft_tokens: int) -> DrawnTree:
    return DrawnTree(
        workload="chat",
        prompt_id="chat-1",
        policy_name="p",
        position=0,
        context_text="",
        root_text="r",
        bonus_text="b",
        num_draft_tokens=num_draft_tokens,
        nodes=[
            TreeNode(parent=parent, token_text="t", path_confidence=0.5, state=state)
            for parent, state in states
        ],
    )


@pytest.mark.parametrize(
    ("states", "num_draft_tokens", "message"),
    [
        ([(0, "pruned")], 1, "node 0 has parent 0: parents must come first"),
        ([(-1, "accepted"), (-1, "accepted")], 3, "node 1 is accepted, but its parent -1 is not"),
        ([(-1, "rejected"), (0, "accepted")], 3, "node 1 is accepted, but its parent 0 is not"),
        ([(-1, "pruned"), (0, "rejected")], 2, "node 1 was verified, but its parent is pruned"),
        ([(-1, "rejected")], 3, "num_draft_tokens is 3, but 2 nodes are"),
    ],
)
def test_impossible_trees_are_refused(
    states: list[tuple[int, str]], num_draft_tokens: int, message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        _tree(states, num_draft_tokens)


def test_correct_drafts_exclude_the_bonus_token() -> None:
    tree = _tree([(-1, "accepted"), (-1, "rejected"), (0, "accepted"), (2, "pruned")], 4)
    assert tree.num_correct_drafts == 2
