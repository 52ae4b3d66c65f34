"""Plots of speed and step time, one small panel a workload, so that a narrow screen stacks them."""

from __future__ import annotations

from matplotlib.axes import Axes

from sgl_eagle_tuner.report.format import MICROSECONDS_PER_MS, format_us
from sgl_eagle_tuner.report.speed import SettingResult, WorkloadResult
from sgl_eagle_tuner.report.svg import PANEL_WIDTH_IN, color, figure, inline_svg, label_rows
from sgl_eagle_tuner.report.wording import STEP_PARTS, setting_label


def draw_speed(result: WorkloadResult, figure_id: str) -> str | None:
    """Measured bars with intervals and predicted diamonds, tokens per second, per setting.

    Args:
        result: One workload.
        figure_id: Unique in the page.

    Returns:
        SVG, or None if no speed of this workload was measured or predicted.
    """
    settings = [
        setting
        for setting in result.settings
        if setting.role != "variant" and (setting.measured_tok_per_s or setting.predicted_tok_per_s)
    ]
    if not settings:
        return None
    with figure(PANEL_WIDTH_IN, 0.75 + 0.36 * len(settings)) as drawing:
        axes = drawing.subplots()
        for row, setting in enumerate(settings):
            _draw_speed_row(axes, row, setting)
        label_rows(axes, [setting_label(setting) for setting in settings])
        axes.set_xlim(left=0)
        axes.set_xlabel("tokens per second")
        spoken = ", ".join(
            f"{setting_label(setting)} {setting.measured_tok_per_s.value:.1f}"
            for setting in settings
            if setting.measured_tok_per_s
        )
        label = f"Tokens per second on {result.workload}, measured: {spoken or 'nothing'}"
        return inline_svg(drawing, figure_id, label)


def _draw_speed_row(axes: Axes, row: int, setting: SettingResult) -> None:
    """Interval in the upper half of the bar, prediction in the lower, each with a halo."""
    measured = setting.measured_tok_per_s
    if measured is not None:
        axes.barh(row, measured.value, height=0.64, color=color(setting.role))
        if measured.low is not None and measured.high is not None:
            ends = [measured.low, measured.high]
            axes.plot(ends, [row - 0.14] * 2, color=color("bg"), linewidth=4.2)
            axes.plot(ends, [row - 0.14] * 2, color=color("ink"), linewidth=1.8)
    if setting.predicted_tok_per_s is not None:
        axes.plot(
            setting.predicted_tok_per_s.value,
            row + 0.15,
            marker="D",
            markersize=5,
            markerfacecolor=color("bg"),
            markeredgecolor=color("ink"),
            markeredgewidth=1.1,
        )


def draw_step_time(result: WorkloadResult, figure_id: str) -> str | None:
    """Where the time of a mean step goes, stacked, per setting.

    Args:
        result: One workload.
        figure_id: Unique in the page.

    Returns:
        SVG, or None if no setting has a measured split.
    """
    settings = [
        setting
        for setting in result.settings
        if setting.step_time is not None and setting.role != "variant"
    ]
    if not settings:
        return None
    with figure(PANEL_WIDTH_IN, 0.75 + 0.36 * len(settings)) as drawing:
        axes = drawing.subplots()
        spoken = []
        for row, setting in enumerate(settings):
            total_us = _stack_step(axes, row, setting)
            spoken.append(f"{setting_label(setting)} {format_us(total_us)}")
        label_rows(axes, [setting_label(setting) for setting in settings])
        axes.set_xlim(left=0)
        axes.set_xlabel("milliseconds per step")
        label = f"Mean time of one step on {result.workload}: {', '.join(spoken)}"
        return inline_svg(drawing, figure_id, label)


def _stack_step(axes: Axes, row: int, setting: SettingResult) -> float:
    left_us = 0.0
    for part in STEP_PARTS:
        part_us = getattr(setting.step_time, f"{part}_us")
        if part_us:
            axes.barh(
                row,
                part_us / MICROSECONDS_PER_MS,
                left=left_us / MICROSECONDS_PER_MS,
                height=0.62,
                color=color(part),
            )
            left_us += part_us
    return left_us
