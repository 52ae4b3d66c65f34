"""The page: one HTML file that needs nothing else, made from `DemoReport` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from typing import TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sgl_eagle_tuner.report import evidence_figures, evidence_view, speed_figures, speed_view
from sgl_eagle_tuner.report.analysis import CostCurve
from sgl_eagle_tuner.report.data import DemoReport
from sgl_eagle_tuner.report.format import (
    NOT_MEASURED,
    format_count,
    format_percent,
    format_things,
    format_us,
)
from sgl_eagle_tuner.report.tree_svg import draw_tree, select_drawn_nodes
from sgl_eagle_tuner.report.trees import DrawnTree
from sgl_eagle_tuner.report.wording import (
    COST_PART_NAMES,
    ROLE_NAMES,
    STEP_PART_NAMES,
    STEP_PARTS,
    overall_sentence,
)

Item = TypeVar("Item")

ROLE_LEGEND = (
    *((role.replace("_", "-"), name, "") for role, name in ROLE_NAMES.items() if role != "variant"),
    ("ink", "95 % interval of the measurement", "line"),
    ("ink", "predicted by replay", "diamond"),
)
STEP_LEGEND = tuple((part.replace("_", "-"), STEP_PART_NAMES[part], "") for part in STEP_PARTS)
SEARCH_LEGEND = (
    ("plain", "trial (▲ above the frame)", ""),
    ("usual", "baseline", ""),
    ("tuned", "best so far", "line"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A small figure with its title.

    Attributes:
        title: Printed above the figure.
        svg: The figure.
    """

    title: str
    svg: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeView:
    """A drawn tree with the text around it.

    Attributes:
        summary: One line, shown while folded.
        context: Text before the root token.
        root: Root token.
        accepted: Accepted draft tokens, joined.
        bonus: Bonus token.
        caption: What the drawing holds and what it leaves out.
        svg: The drawing.
    """

    summary: str
    context: str
    root: str
    accepted: str
    bonus: str
    caption: str
    svg: Markup


def render_report(report: DemoReport) -> str:
    """Render the page.

    Args:
        report: All numbers; the same data always gives the same page, byte for byte.

    Returns:
        A complete HTML document without scripts or outside resources.
    """
    environment = Environment(
        loader=PackageLoader("sgl_eagle_tuner.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    css = resources.files("sgl_eagle_tuner.report").joinpath("templates/report.css")
    return environment.get_template("report.html.j2").render(
        report=report,
        missing=NOT_MEASURED,
        css=Markup(css.read_text(encoding="utf-8")),
        role_legend=ROLE_LEGEND,
        step_legend=STEP_LEGEND,
        search_legend=SEARCH_LEGEND,
        **_sentences(report),
        **_tables(report),
        **_panels(report),
    )


def _sentences(report: DemoReport) -> dict[str, object]:
    made = report.provenance
    costs = report.costs
    worst = report.overall.worst_prediction_error
    limits = [
        study.uncovered_limit for study in report.searches if study.uncovered_limit is not None
    ]
    return {
        "maker": f"sgl-eagle {made.versions.get('sgl-eagle', '')}".strip(),
        "subtitle": f"{made.engine} on {made.device}, {made.created:%d %B %Y}",
        "headline": overall_sentence(report.overall),
        "prediction_sentence": (f"Largest error of a prediction: {format_percent(worst)}."),
        "decide_sentence": (
            f"Decision after a draft step: {format_us(costs.decide_us if costs else None)}; "
            "choosing the nodes to verify: "
            f"{format_us(costs.verify_select_us if costs else None)}."
        ),
        "uncovered_sentence": (
            "A trial that needs drafts beyond the recorded trees at more than "
            f"{format_percent(max(limits))} of the positions is infeasible and not drawn."
            if limits
            else ""
        ),
    }


def _tables(report: DemoReport) -> dict[str, object]:
    return {
        "cards": speed_view.recommendation_cards(report),
        "speed_table": speed_view.speed_table(report),
        "decision_table": speed_view.decision_table(report),
        "summary_table": speed_view.summary_table(report),
        "accept_table": speed_view.accept_table(report),
        "step_table": speed_view.step_table(report),
        "cost_error_table": evidence_view.cost_error_table(report),
        "calibration_table": evidence_view.calibration_table(report.calibrations),
        "search_table": evidence_view.search_table(report.searches),
        "marginal_table": evidence_view.marginal_table(report.searches),
        "correctness_table": evidence_view.correctness_table(report),
        "stage_table": evidence_view.stage_table(report),
        "provenance": evidence_view.provenance_rows(report),
    }


def _panels(report: DemoReport) -> dict[str, object]:
    return {
        "speed_panels": _draw_each(
            report.workloads, "speed", lambda result: result.workload, speed_figures.draw_speed
        ),
        "step_panels": _draw_each(
            report.workloads, "step", lambda result: result.workload, speed_figures.draw_step_time
        ),
        "cost_panels": _draw_each(
            _cost_groups(report), "cost", _cost_title, evidence_figures.draw_costs
        ),
        "reliability_panels": _draw_each(
            report.calibrations,
            "reliability",
            lambda result: result.workload,
            evidence_figures.draw_reliability,
        ),
        "search_panels": _draw_each(
            report.searches, "search", lambda study: study.workload, evidence_figures.draw_search
        ),
        "importance_panels": _draw_each(
            report.searches,
            "importance",
            lambda study: study.workload,
            lambda study, figure_id: evidence_figures.draw_importances(
                study.importances, figure_id
            ),
        ),
        "trees": [_tree_view(tree) for tree in report.trees],
        "trees_have_accept_prob": any(
            node.accept_prob is not None for tree in report.trees for node in tree.nodes
        ),
    }


def _draw_each(
    items: Iterable[Item],
    name: str,
    title: Callable[[Item], str],
    draw: Callable[[Item, str], str | None],
) -> list[Panel]:
    drawn = [(title(item), draw(item, f"{name}-{index}")) for index, item in enumerate(items)]
    # Figures come from our own drawing code, which escapes what it takes from the data.
    return [Panel(title=text, svg=Markup(svg)) for text, svg in drawn if svg is not None]


def _cost_groups(report: DemoReport) -> list[list[CostCurve]]:
    order = list(COST_PART_NAMES)

    def key(curve: CostCurve) -> tuple[int, int]:
        return (curve.batch_size, order.index(curve.part))

    curves = sorted(report.costs.curves if report.costs else (), key=key)
    return [list(group) for _, group in groupby(curves, key=key)]


def _cost_title(curves: list[CostCurve]) -> str:
    return f"{COST_PART_NAMES[curves[0].part]}, batch size {curves[0].batch_size}"


def _tree_view(tree: DrawnTree) -> TreeView:
    num_drafted = len(tree.nodes)
    num_omitted = num_drafted - len(select_drawn_nodes(tree.nodes))
    num_pruned = num_drafted + 1 - tree.num_draft_tokens
    num_accept_tokens = tree.num_correct_drafts + 1
    omitted = (
        f" {format_things(num_omitted, 'pruned node')} of least confidence left out."
        if num_omitted
        else ""
    )
    accepted = [node.token_text for node in tree.nodes if node.state == "accepted"]
    return TreeView(
        summary=(
            f"{tree.workload}, {tree.policy_name}: {format_count(num_drafted)} drafted, "
            f"{format_count(tree.num_draft_tokens)} verified, "
            f"{format_things(num_accept_tokens, 'token')} emitted"
        ),
        context=tree.context_text,
        root=tree.root_text,
        accepted="".join(accepted),
        bonus=tree.bonus_text,
        caption=(
            f"Prompt {tree.prompt_id}, from token {format_count(tree.position)} of the completion. "
            f"{format_things(num_drafted, 'node')} drafted, {format_count(num_pruned)} pruned, "
            f"{format_count(tree.num_draft_tokens)} verified with the root, "
            f"{format_count(tree.num_correct_drafts)} accepted and one bonus token: "
            f"{format_things(num_accept_tokens, 'token')} from one target pass.{omitted}"
        ),
        svg=Markup(draw_tree(tree)),
    )
