"""The page as text: complete, self-contained, escaped, repeatable; nothing missing goes unsaid."""

import random
import re
from html.parser import HTMLParser
from types import UnionType
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from sgl_eagle_tuner.report.base import Estimate
from sgl_eagle_tuner.report.data import DemoReport
from sgl_eagle_tuner.report.render import render_report
from sgl_eagle_tuner.report.svg import PALETTE

SECTIONS = (
    "recommendation",
    "speed",
    "steps",
    "costs",
    "calibration",
    "trees",
    "search",
    "correctness",
    "time",
    "provenance",
    "conventions",
)
VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """Checks nesting; collects ids, links, tags and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert self.open_tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open_tags:
            self.text.append(data)

    def values(self, attribute: str) -> list[str]:
        return [attrs[attribute] or "" for _, attrs in self.tags if attribute in attrs]


@pytest.fixture(scope="module")
def full_page(full_html: str) -> Page:
    return Page(full_html)


def test_ids_are_unique_and_links_lead_somewhere(full_page: Page) -> None:
    ids = full_page.values("id")
    assert len(set(ids)) == len(ids)
    links = full_page.values("href") + full_page.values("xlink:href")
    inner = [link[1:] for link in links if link.startswith("#")]
    assert set(SECTIONS) <= set(inner)
    assert set(inner) <= set(ids)
    assert [link for link in links if not link.startswith("#")] == ["data:,"]


def test_clip_paths_belong_to_their_own_figure(full_html: str, full_page: Page) -> None:
    used = set(re.findall(r"url\(#([^)]+)\)", full_html))
    assert used
    assert used <= set(full_page.values("id"))


def test_the_page_needs_nothing_else(full_page: Page) -> None:
    tags = {tag for tag, _ in full_page.tags}
    assert not tags & {"script", "iframe", "object", "embed", "img", "audio", "video", "form"}
    assert full_page.values("src") == []
    policy = [attrs["content"] for tag, attrs in full_page.tags if attrs.get("http-equiv")]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_no_style_of_a_figure_leaks_into_the_page(full_page: Page) -> None:
    assert [tag for tag, _ in full_page.tags].count("style") == 1


def test_every_figure_says_what_it_shows(full_page: Page) -> None:
    figures = [attrs for tag, attrs in full_page.tags if tag == "svg"]
    assert len(figures) == 5 + 5 + 3 + 6 + 3 + 5 + 5
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in figures)


def test_no_stand_in_colour_is_left(full_html: str) -> None:
    assert [drawn for drawn, _ in PALETTE.values() if drawn in full_html] == []
    declared = set(re.findall(r"--([a-z0-9-]+):", full_html))
    assert set(re.findall(r"var\(--([a-z0-9-]+)", full_html)) <= declared


def test_both_colour_schemes_define_the_same_colours(full_html: str) -> None:
    blocks = re.findall(r":root \{([^}]*)\}", full_html)
    light, dark = (set(re.findall(r"--([a-z0-9-]+):", block)) for block in blocks)
    assert light == dark
    assert {name.replace("_", "-") for name in PALETTE} <= light


def test_the_same_data_give_the_same_page(full_report: DemoReport, full_html: str) -> None:
    again = DemoReport.model_validate_json(full_report.model_dump_json())
    assert render_report(again) == full_html


def test_text_from_the_data_is_escaped(bare_report: DemoReport, full_report: DemoReport) -> None:
    evil = '<script>alert("&")</script>'
    tree = full_report.trees[0].model_copy(
        update={"context_text": evil, "root_text": evil, "bonus_text": evil, "prompt_id": evil}
    )
    study = full_report.searches[0]
    importances = tuple(item.model_copy(update={"param": evil}) for item in study.importances[:2])
    workload = full_report.workloads[0].model_copy(update={"workload": evil, "reason": evil})
    report = bare_report.model_copy(
        update={
            "title": evil,
            "serving_note": evil,
            "policy_file": evil,
            "workloads": (workload,),
            "trees": (tree,),
            "searches": (study.model_copy(update={"importances": importances}),),
            "correctness": (full_report.correctness[0].model_copy(update={"name": evil}),),
        }
    )
    page = Page(render_report(report))
    assert "script" not in {tag for tag, _ in page.tags}
    assert sum(evil in text for text in page.text) >= 8


def test_a_dollar_sign_in_a_name_is_no_formula(bare_report: DemoReport) -> None:
    plain = bare_report.workloads[0].settings[0]
    policy = plain.policy.model_copy(update={"name": "a$b_{"})
    speed = Estimate(value=3.0)
    odd = plain.model_copy(update={"policy": policy, "role": "tuned", "measured_tok_per_s": speed})
    workload = bare_report.workloads[0].model_copy(update={"settings": (odd,), "workload": "$x"})
    assert "$x" in render_report(bare_report.model_copy(update={"workloads": (workload,)}))


def test_a_bare_report_says_what_was_not_measured(bare_html: str) -> None:
    page = Page(bare_html)
    assert set(SECTIONS) <= set(page.values("id"))
    text = " ".join(page.text)
    for subject in (
        "the gain was",
        "Speed:",
        "Split of the step time:",
        "Cost curves:",
        "Reliability diagrams:",
        "Draft trees:",
        "Trials:",
        "Exactness checks:",
        "Stage times:",
        "Decision after a draft step:",
    ):
        assert re.search(rf"{subject}\s+not measured", text), subject
    assert "The engine ran" not in text
    assert "What to see" not in text
    assert not re.search(r"\bNone\b|\bnan\b", text)
    assert "svg" not in {tag for tag, _ in page.tags}


def test_the_full_report_lacks_nothing(full_page: Page) -> None:
    said = [text for text in full_page.text if "not measured" in text]
    assert said == ["not measured"]  # the entry in the conventions


def test_only_made_up_numbers_carry_the_banner(full_html: str, bare_html: str) -> None:
    assert "Made-up numbers" in full_html
    assert "Made-up numbers" not in bare_html


def _optional(annotation: object) -> bool:
    return isinstance(annotation, UnionType) and type(None) in get_args(annotation)


def _drop_some(value: Any, rng: random.Random) -> Any:
    if isinstance(value, tuple):
        return tuple(_drop_some(item, rng) for item in value)
    if not isinstance(value, BaseModel) or isinstance(value, Estimate):
        return value
    update = {}
    for name, field in type(value).model_fields.items():
        may_go = _optional(field.annotation) or (not field.is_required() and field.default == ())
        if may_go and rng.random() < 0.3:
            update[name] = None if _optional(field.annotation) else ()
        else:
            update[name] = _drop_some(getattr(value, name), rng)
    return value.model_copy(update=update)


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32))
def test_any_part_may_be_missing(full_report: DemoReport, seed: int) -> None:
    small = full_report.model_copy(
        update={
            "workloads": full_report.workloads[:1],
            "calibrations": full_report.calibrations[:2],
            "searches": full_report.searches[:1],
        }
    )
    holes = _drop_some(small, random.Random(seed))
    checked = DemoReport.model_validate_json(holes.model_dump_json())
    page = Page(render_report(checked))
    assert set(SECTIONS) <= set(page.values("id"))
    assert not re.search(r"\bNone\b|\bnan\b", " ".join(page.text))
