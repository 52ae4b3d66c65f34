"""Recommendation and speeds as text: the arithmetic that the template must not do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sgl_eagle_tuner.report.data import DemoReport
from sgl_eagle_tuner.report.format import (
    NOT_MEASURED,
    NOTHING,
    format_count,
    format_number,
    format_percent,
    format_ratio,
    format_signed_percent,
    format_things,
    format_us,
)
from sgl_eagle_tuner.report.speed import SettingResult, SettingRole, StepTimeSplit, WorkloadResult
from sgl_eagle_tuner.report.table import (
    Cell,
    Group,
    Row,
    Table,
    estimate_cell,
    ratio_cell,
    time_cell,
)
from sgl_eagle_tuner.report.wording import (
    ROLE_NAMES,
    STEP_PART_NAMES,
    STEP_PARTS,
    launch_flags,
    recommendation_sentence,
    setting_label,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The recommendation for one workload.

    Attributes:
        workload: Its name.
        policy: Name of the recommended setting.
        gain: Gain over plain decoding, short.
        sentence: The recommendation in words.
        reason: Why.
        flags: Flags of `sglang.launch_server`, empty for plain decoding.
    """

    workload: str
    policy: str
    gain: str
    sentence: str
    reason: str
    flags: tuple[str, ...]


def prediction_error(setting: SettingResult) -> float | None:
    """How far the replay's prediction is from the engine.

    Args:
        setting: Any setting.

    Returns:
        predicted / measured - 1 of tokens/s, as a fraction; None if one of them is missing.
    """
    measured, predicted = setting.measured_tok_per_s, setting.predicted_tok_per_s
    if measured is None or predicted is None or measured.value <= 0:
        return None
    return predicted.value / measured.value - 1


def recommendation_cards(report: DemoReport) -> tuple[Card, ...]:
    """One card per workload.

    Args:
        report: The data.

    Returns:
        Cards in the order of the workloads.
    """
    cards = []
    for result in report.workloads:
        setting = result.setting(result.recommended)
        assert setting is not None, "WorkloadResult checks that the recommended role exists"
        cards.append(
            Card(
                workload=result.workload,
                policy=setting_label(setting),
                gain=format_ratio(setting.gain_over_plain),
                sentence=recommendation_sentence(result),
                reason=result.reason,
                flags=launch_flags(setting.policy, report),
            )
        )
    return tuple(cards)


def _setting_table(
    report: DemoReport,
    columns: tuple[str, ...],
    cells: Callable[[SettingResult], tuple[Cell, ...]],
    *,
    variants: bool = False,
) -> Table:
    groups = []
    for result in report.workloads:
        rows = tuple(
            Row(
                head=setting_label(setting),
                cells=cells(setting),
                strong=setting.role == result.recommended,
            )
            for setting in result.settings
            if (setting.role == "variant") == variants
        )
        if rows:
            groups.append(Group(name=result.workload, rows=rows))
    return Table(columns=("setting", *columns), groups=tuple(groups))


def _speed_cells(setting: SettingResult) -> tuple[Cell, ...]:
    error = prediction_error(setting)
    return (
        estimate_cell(setting.measured_tok_per_s),
        estimate_cell(setting.predicted_tok_per_s),
        Cell(text=format_signed_percent(error)),
        ratio_cell(setting.gain_over_plain),
        ratio_cell(setting.gain_over_best_static),
    )


SPEED_COLUMNS = (
    "measured tok/s",
    "predicted tok/s",
    "predicted vs measured",
    "over plain",
    "over best static",
)


def speed_table(report: DemoReport) -> Table:
    """Measured and predicted speed of every workload and setting.

    Args:
        report: The data.

    Returns:
        One group per workload, the recommended setting strong.
    """
    return _setting_table(report, SPEED_COLUMNS, _speed_cells)


def decision_table(report: DemoReport) -> Table:
    """What the tuned policy loses with one decision switched off, in speed.

    Args:
        report: The data.

    Returns:
        One row per workload, one column per variant; no group if there are no variants.
    """
    variants = [s for result in report.workloads for s in result.settings if s.role == "variant"]
    names = tuple(dict.fromkeys(setting.policy.name for setting in variants))
    rows = tuple(
        Row(head=result.workload, cells=tuple(_decision_cell(result, name) for name in names))
        for result in report.workloads
    )
    return Table(columns=("workload", *names), groups=(Group(name="", rows=rows),) if names else ())


def _decision_cell(result: WorkloadResult, name: str) -> Cell:
    tuned = result.setting("tuned")
    found = [s for s in result.settings if s.role == "variant" and s.policy.name == name]
    if tuned is None or not found:
        return Cell(text=NOT_MEASURED)
    variant = found[0]
    for changed, whole, source in (
        (variant.measured_tok_per_s, tuned.measured_tok_per_s, "measured"),
        (variant.predicted_tok_per_s, tuned.predicted_tok_per_s, "predicted"),
    ):
        if changed is not None and whole is not None and whole.value > 0:
            change = changed.value / whole.value - 1
            return Cell(text=format_signed_percent(change), small=source)
    return Cell(text=NOT_MEASURED)


def summary_table(report: DemoReport) -> Table:
    """Accept length over time per token, one row per workload.

    Args:
        report: The data.

    Returns:
        A column per role that occurs; the recommended setting of each workload is strong.
    """
    roles = [
        role
        for role in ROLE_NAMES
        if role != "variant" and any(result.setting(role) for result in report.workloads)
    ]
    rows = tuple(
        Row(head=result.workload, cells=tuple(_summary_cell(result, role) for role in roles))
        for result in report.workloads
    )
    columns = ("workload", *(ROLE_NAMES[role] for role in roles))
    return Table(columns=columns, groups=(Group(name="", rows=rows),))


def _summary_cell(result: WorkloadResult, role: SettingRole) -> Cell:
    setting = result.setting(role)
    if setting is None:
        return Cell(text=NOT_MEASURED)
    length, time_us = setting.accept_length, setting.time_per_token_us
    return Cell(
        text=format_number(length.value if length else None, 2),
        small=format_us(time_us.value) if time_us else "",
        strong=role == result.recommended,
    )


def _accept_cells(setting: SettingResult) -> tuple[Cell, ...]:
    tokens = format_count(setting.num_tokens)
    has_no_rate = setting.role == "plain"
    return (
        estimate_cell(setting.accept_length, 2),
        Cell(text=NOTHING if has_no_rate else format_percent(setting.accept_rate)),
        time_cell(setting.time_per_token_us),
        Cell(text=format_number(setting.mean_num_steps)),
        Cell(text=format_number(setting.mean_num_draft_tokens)),
        Cell(text=format_percent(setting.speculated_share, 0)),
        Cell(
            text=tokens,
            small=format_things(setting.num_prompts, "prompt") if setting.num_prompts else "",
        ),
    )


def accept_table(report: DemoReport) -> Table:
    """Accept length, time per token and the trees behind them.

    Args:
        report: The data.

    Returns:
        One group per workload.
    """
    columns = (
        "accept length",
        "accept rate",
        "time per token",
        "draft steps",
        "tokens verified",
        "steps that drafted",
        "tokens measured",
    )
    return _setting_table(report, columns, _accept_cells)


def _step_cells(setting: SettingResult) -> tuple[Cell, ...]:
    split = setting.step_time or StepTimeSplit()
    parts_us = [getattr(split, f"{part}_us") for part in STEP_PARTS]
    measured_us = [part_us for part_us in parts_us if part_us is not None]
    total_us = sum(measured_us) if measured_us else None
    return tuple(Cell(text=format_us(part_us)) for part_us in (*parts_us, total_us))


def step_table(report: DemoReport) -> Table:
    """Where the time of a mean step goes.

    Args:
        report: The data.

    Returns:
        One group per workload.
    """
    columns = (*(STEP_PART_NAMES[part] for part in STEP_PARTS), "whole step")
    return _setting_table(report, columns, _step_cells)
