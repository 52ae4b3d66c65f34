"""Numbers and sentences as the page prints them."""

import pytest

from sgl_eagle_tuner.report import format as fmt
from sgl_eagle_tuner.report.base import Estimate
from sgl_eagle_tuner.report.data import DemoReport
from sgl_eagle_tuner.report.speed import OverallResult, PolicySetting, SettingResult, WorkloadResult
from sgl_eagle_tuner.report.wording import (
    gain_phrase,
    launch_flags,
    overall_sentence,
    recommendation_sentence,
    setting_label,
)

EAGLE2 = PolicySetting(name="e", kind="eagle2", num_steps=5, topk=4, num_draft_tokens=8)


def plain_spaces(text: str) -> str:
    return text.replace(fmt.NARROW_SPACE, " ")


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (1234.56, 1, "1,234.6"),
        (-0.04, 1, "0.0"),
        (-1.25, 2, "\N{MINUS SIGN}1.25"),
        (0.0, 0, "0"),
        (None, 1, "not measured"),
    ],
)
def test_format_number(value: float | None, digits: int, text: str) -> None:
    assert fmt.format_number(value, digits) == text


@pytest.mark.parametrize(
    ("value_us", "text"),
    [
        (0.0, "0 \N{MICRO SIGN}s"),
        (999.0, "999 \N{MICRO SIGN}s"),
        (1_000.0, "1.0 ms"),
        (40_650.0, "40.6 ms"),
        (140_650.0, "141 ms"),
        (None, "not measured"),
    ],
)
def test_format_us(value_us: float | None, text: str) -> None:
    assert plain_spaces(fmt.format_us(value_us)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.21, "4.2 s"), (59.4, "59.4 s"), (59.6, "1 min 00 s"), (185.2, "3 min 05 s")],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert plain_spaces(fmt.format_seconds(seconds)) == text


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0.0151, "+1.5 %"), (-0.03, "\N{MINUS SIGN}3.0 %"), (0.0001, "0.0 %"), (None, "not measured")],
)
def test_format_signed_percent(fraction: float | None, text: str) -> None:
    assert plain_spaces(fmt.format_signed_percent(fraction)) == text


def test_format_things() -> None:
    assert fmt.format_things(1, "token") == "1 token"
    assert fmt.format_things(2000, "token") == "2,000 tokens"


def test_format_interval_and_ratio() -> None:
    gain = Estimate(value=1.518, low=1.461, high=1.579)
    assert fmt.format_ratio(gain) == "1.52\N{MULTIPLICATION SIGN}"
    assert fmt.format_interval(gain, 2) == "1.46 to 1.58"
    assert fmt.format_interval(Estimate(value=1.0), 2) == ""
    assert fmt.format_ratio(None) == "not measured"


def test_a_digest_is_cut_and_its_absence_said() -> None:
    assert fmt.format_digest("0123456789abcdef") == "0123456789ab"
    assert fmt.format_digest(None) == "not recorded"


def test_a_gain_whose_interval_holds_one_is_called_unclear() -> None:
    unclear = gain_phrase(Estimate(value=1.02, low=0.99, high=1.05), "plain decoding")
    assert unclear.endswith("0.99 to 1.05, no clear difference)")
    clear = gain_phrase(Estimate(value=1.02, low=1.01, high=1.05), "plain decoding")
    assert "no clear difference" not in clear
    loss = gain_phrase(Estimate(value=0.9, low=0.85, high=0.95), "plain decoding")
    assert loss.startswith("0.90\N{MULTIPLICATION SIGN} the speed of plain decoding")
    assert gain_phrase(None, "plain decoding") == "gain over plain decoding not measured"
    assert "no interval" in gain_phrase(Estimate(value=1.2), "plain decoding")


def test_stock_trees_get_stock_flags(bare_report: DemoReport) -> None:
    assert launch_flags(EAGLE2, bare_report) == (
        "--speculative-algorithm EAGLE3",
        "--speculative-num-steps 5",
        "--speculative-eagle-topk 4",
        "--speculative-num-draft-tokens 8",
    )


def test_other_policies_need_the_policy_file(bare_report: DemoReport) -> None:
    report = bare_report.model_copy(update={"policy_file": "tuned.json"})
    shaped = EAGLE2.model_copy(update={"kind": "static"})
    price = EAGLE2.model_copy(update={"kind": "price"})
    for policy in (shaped, price):
        flags = launch_flags(policy, report)
        assert flags[0] == "--speculative-algorithm SGL_EAGLE"
        assert flags[-1] == "--sgl-eagle-policy tuned.json"
    chain = EAGLE2.model_copy(update={"kind": "static", "topk": 1})
    assert launch_flags(chain, report)[0] == "--speculative-algorithm EAGLE3"


def test_plain_decoding_needs_no_flags(bare_report: DemoReport) -> None:
    assert launch_flags(PolicySetting(name="plain", kind="plain"), bare_report) == ()


def test_a_policy_that_decides_shows_its_limits_as_limits() -> None:
    fixed = SettingResult(role="best_static", policy=EAGLE2)
    deciding = EAGLE2.model_copy(update={"decisions": ("prune",)})
    assert setting_label(fixed) == "best static 5/4/8"
    assert setting_label(SettingResult(role="tuned", policy=deciding)) == "tuned ≤5/4/8"


def _workload(recommended: str) -> WorkloadResult:
    plain = SettingResult(role="plain", policy=PolicySetting(name="plain", kind="plain"))
    gain = Estimate(value=1.5, low=1.4, high=1.6)
    over_static = Estimate(value=1.04, low=1.01, high=1.07)
    others = [
        SettingResult(
            role=role,
            policy=EAGLE2,
            gain_over_plain=gain,
            gain_over_best_static=over_static,
            num_prompts=12,
        )
        for role in ("usual", "best_static", "tuned")
    ]
    return WorkloadResult(
        workload="chat", recommended=recommended, reason="Because.", settings=[plain, *others]
    )


def test_recommendation_names_both_gains_and_the_sample() -> None:
    sentence = plain_spaces(recommendation_sentence(_workload("tuned")))
    assert sentence == (
        "Run the tuned policy: 1.50\N{MULTIPLICATION SIGN} the speed of plain decoding (95 % "
        "interval 1.40 to 1.60) and 1.04\N{MULTIPLICATION SIGN} the speed of the best static "
        "setting (1.01 to 1.07), measured on 12 held-out prompts."
    )


def test_best_static_is_not_compared_with_itself() -> None:
    sentence = recommendation_sentence(_workload("best_static"))
    assert sentence.startswith("Run the best static setting: ")
    assert sentence.count("the best static setting") == 1


def test_plain_decoding_can_be_the_advice() -> None:
    assert recommendation_sentence(_workload("plain")).startswith("Decode plainly")


def test_an_unmeasured_gain_is_said_once() -> None:
    workload = _workload("tuned")
    tuned = workload.settings[-1].model_copy(
        update={"gain_over_plain": None, "gain_over_best_static": None}
    )
    bare = workload.model_copy(update={"settings": (*workload.settings[:-1], tuned)})
    sentence = recommendation_sentence(bare)
    assert sentence == "Run the tuned policy; its gain was not measured."


def test_the_headline_says_when_nothing_was_measured() -> None:
    assert "not measured" in overall_sentence(OverallResult())
    known = OverallResult(gain_over_plain=Estimate(value=1.5, low=1.4, high=1.6))
    assert "1.50" in overall_sentence(known)
    assert "static" not in overall_sentence(known)
