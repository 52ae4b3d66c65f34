"""Plots of costs, calibration and search, one small panel each."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sgl_eagle_tuner.report.analysis import (
    CalibrationResult,
    CostCurve,
    Importance,
    ReliabilityCurve,
    SearchResult,
)
from sgl_eagle_tuner.report.format import MICROSECONDS_PER_MS, format_us
from sgl_eagle_tuner.report.svg import PANEL_WIDTH_IN, color, figure, inline_svg, label_rows
from sgl_eagle_tuner.report.wording import COST_PART_NAMES

MAX_CONTEXT_CURVES = 4
"""Curves in one cost panel; more of them cannot be told apart."""


def draw_costs(curves: Sequence[CostCurve], figure_id: str) -> str | None:
    """Time of one kind of pass against tokens, one line per context length.

    Args:
        curves: Curves of one part and one batch size.
        figure_id: Unique in the page.

    Returns:
        SVG, or None if there is no curve.
    """
    curves = sorted((c for c in curves if c.num_tokens), key=lambda curve: curve.context_len)
    if not curves:
        return None
    curves = _spread(curves, MAX_CONTEXT_CURVES)
    with figure(PANEL_WIDTH_IN * 0.86, 2.7) as drawing:
        axes = drawing.subplots()
        for index, curve in enumerate(curves):
            axes.plot(
                curve.num_tokens,
                [median_us / MICROSECONDS_PER_MS for median_us in curve.median_us],
                color=color(f"context_{index + MAX_CONTEXT_CURVES - len(curves)}"),
                marker="osD^"[index],
                markersize=4,
                linewidth=1.6,
                label=f"context {curve.context_len:,}",
            )
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 4, 8, 10]))
        axes.set_xlabel("tokens per request")
        axes.set_ylabel("ms")
        axes.legend(frameon=False, fontsize=8, loc="best")
        longest = curves[-1]
        label = (
            f"{COST_PART_NAMES[longest.part]} at context {longest.context_len}: from "
            f"{format_us(longest.median_us[0])} at {longest.num_tokens[0]} tokens to "
            f"{format_us(longest.median_us[-1])} at {longest.num_tokens[-1]}"
        )
        return inline_svg(drawing, figure_id, label)


def _spread(curves: list[CostCurve], limit: int) -> list[CostCurve]:
    if len(curves) <= limit:
        return curves
    last = len(curves) - 1
    return [curves[round(index * last / (limit - 1))] for index in range(limit)]


def draw_reliability(result: CalibrationResult, figure_id: str) -> str | None:
    """Acceptance against confidence, before and after calibration.

    Args:
        result: One workload, or all together.
        figure_id: Unique in the page.

    Returns:
        SVG, or None if neither curve has a bin.
    """
    before = result.before if result.before and result.before.bins else None
    after = result.after if result.after and result.after.bins else None
    if before is None and after is None:
        return None
    with figure(3.3, 3.2) as drawing:
        axes = drawing.subplots()
        axes.plot([0, 1], [0, 1], color=color("muted"), linewidth=0.8, linestyle=(0, (2, 2)))
        if before is not None:
            _draw_reliability_curve(axes, before, "usual", "before")
        if after is not None:
            _draw_reliability_curve(axes, after, "tuned", "after")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_aspect("equal")
        axes.set_xlabel("confidence (mean of bin)")
        axes.set_ylabel("share accepted")
        axes.legend(frameon=False, fontsize=8, loc="upper left")
        spoken = " and ".join(
            f"{len(curve.bins)} bins {when} calibration"
            for when, curve in (("before", before), ("after", after))
            if curve is not None
        )
        return inline_svg(drawing, figure_id, f"Reliability on {result.workload}: {spoken}")


def _draw_reliability_curve(axes: Axes, curve: ReliabilityCurve, name: str, when: str) -> None:
    x = [item.confidence for item in curve.bins]
    y = [item.accept_rate for item in curve.bins]
    for item in curve.bins:
        if item.low is not None and item.high is not None:
            ends = [item.low, item.high]
            axes.plot([item.confidence] * 2, ends, color=color(name), linewidth=1)
    axes.plot(
        x,
        y,
        color=color(name),
        linewidth=1.5,
        linestyle="-" if when == "after" else "--",
        marker="o" if when == "after" else "s",
        markersize=4.5,
        markerfacecolor=color(name) if when == "after" else "none",
        label=f"{when} ({curve.kind})",
    )


def draw_search(result: SearchResult, figure_id: str) -> str | None:
    """Every feasible trial's time per token, the baselines, and the best so far.

    Args:
        result: One workload's study.
        figure_id: Unique in the page.

    Returns:
        SVG, or None if no trial was feasible.
    """
    feasible = [
        (trial.number, trial.time_per_token_us / MICROSECONDS_PER_MS, trial.baseline)
        for trial in result.trials
        if trial.time_per_token_us is not None
    ]
    if not feasible:
        return None
    baselines = [point for point in feasible if point[2] is not None]
    sampled = [point for point in feasible if point[2] is None]
    best_ms = min(point[1] for point in feasible)
    top_ms = max([point[1] for point in baselines] or [point[1] for point in feasible])
    top_ms = best_ms + 1.12 * max(top_ms - best_ms, 0.1 * best_ms)
    with figure(PANEL_WIDTH_IN, 2.5) as drawing:
        axes = drawing.subplots()
        shown = [point for point in sampled if point[1] <= top_ms]
        above = [point for point in sampled if point[1] > top_ms]
        axes.scatter([p[0] for p in shown], [p[1] for p in shown], s=11, color=color("plain"))
        axes.scatter(
            [p[0] for p in above], [top_ms] * len(above), s=14, marker="^", color=color("variant")
        )
        axes.scatter(
            [p[0] for p in baselines],
            [p[1] for p in baselines],
            s=26,
            zorder=3,
            marker="D",
            color=color("usual"),
        )
        _draw_best_so_far(axes, feasible)
        axes.set_ylim(best_ms - 0.08 * (top_ms - best_ms), top_ms + 0.02 * (top_ms - best_ms))
        axes.set_xlabel("trial")
        axes.set_ylabel("ms per token")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 4, 8, 10]))
        label = (
            f"Search on {result.workload}: {len(feasible)} feasible trials, best "
            f"{best_ms:.2f} ms per token"
        )
        return inline_svg(drawing, figure_id, label)


def _draw_best_so_far(axes: Axes, points: list[tuple[int, float, str | None]]) -> None:
    best: list[float] = []
    for _, time_ms, _ in points:
        best.append(min(time_ms, best[-1] if best else time_ms))
    numbers = [point[0] for point in points]
    axes.step(numbers, best, where="post", color=color("tuned"), linewidth=1.8)


def draw_importances(importances: Sequence[Importance], figure_id: str) -> str | None:
    """How much each parameter moves the objective.

    Args:
        importances: Of one workload, most important first.
        figure_id: Unique in the page.

    Returns:
        SVG, or None if there are none.
    """
    if not importances:
        return None
    with figure(PANEL_WIDTH_IN, 0.7 + 0.27 * len(importances)) as drawing:
        axes = drawing.subplots()
        shares = [100 * item.share for item in importances]
        axes.barh(range(len(shares)), shares, height=0.6, color=color("best_static"))
        label_rows(axes, [item.param for item in importances])
        axes.set_xlim(left=0)
        axes.set_xlabel("share of the variation between trials, %")
        spoken = ", ".join(f"{item.param} {100 * item.share:.0f} %" for item in importances)
        return inline_svg(drawing, figure_id, f"Parameter importance: {spoken}")
