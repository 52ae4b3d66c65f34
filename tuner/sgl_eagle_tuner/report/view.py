"""The page's content as text: all arithmetic and formatting that the template must not do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sgl_eagle_tuner.report.analysis import CalibrationResult, ReliabilityCurve, SearchResult
from sgl_eagle_tuner.report.data import DemoReport, ModelIdentity
from sgl_eagle_tuner.report.format import (
    NOT_MEASURED,
    NOT_RECORDED,
    format_count,
    format_digest,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
    format_us,
)
from sgl_eagle_tuner.report.speed import SettingResult, StepTimeSplit
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
    COST_PART_NAMES,
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
    signed = "" if error is None or error < 0 else "+"
    return (
        estimate_cell(setting.measured_tok_per_s),
        estimate_cell(setting.predicted_tok_per_s),
        Cell(text=f"{signed}{format_percent(error)}"),
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


def variant_table(report: DemoReport) -> Table:
    """The same for the tuned policy with one decision switched off.

    Args:
        report: The data.

    Returns:
        One group per workload that has variants.
    """
    return _setting_table(report, SPEED_COLUMNS, _speed_cells, variants=True)


def _accept_cells(setting: SettingResult) -> tuple[Cell, ...]:
    tokens = format_count(setting.num_tokens)
    prompts = format_count(setting.num_prompts)
    return (
        estimate_cell(setting.accept_length, 2),
        Cell(text=format_percent(setting.accept_rate)),
        time_cell(setting.time_per_token_us),
        Cell(text=format_number(setting.mean_num_steps)),
        Cell(text=format_number(setting.mean_num_draft_tokens)),
        Cell(text=format_percent(setting.speculated_share, 0)),
        Cell(text=tokens, small=f"{prompts} prompts" if setting.num_prompts else ""),
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


def cost_error_table(report: DemoReport) -> Table:
    """The cost table's error on cells left out of its fit.

    Args:
        report: The data.

    Returns:
        One row per kind of pass; no group if no error was measured.
    """
    errors = report.costs.errors if report.costs else ()
    rows = tuple(
        Row(
            head=COST_PART_NAMES[error.part],
            cells=(
                Cell(text=format_count(error.num_cells)),
                Cell(text=format_percent(error.median_rel_error)),
                Cell(text=format_percent(error.max_rel_error)),
            ),
        )
        for error in errors
    )
    columns = ("pass", "cells left out", "median error", "largest error")
    return Table(columns=columns, groups=(Group(name="", rows=rows),) if rows else ())


def _curve_row(head: str, curve: ReliabilityCurve | None) -> Row:
    scores = (None, None, None) if curve is None else (curve.ece, curve.brier, curve.auc)
    kind = NOT_MEASURED if curve is None else curve.kind
    return Row(
        head=head,
        cells=(Cell(text=kind), *(Cell(text=format_number(score, 3)) for score in scores)),
        strong=head == "after",
    )


def calibration_table(results: Iterable[CalibrationResult]) -> Table:
    """ECE, Brier score and AUC before and after calibration.

    Args:
        results: One per workload.

    Returns:
        One group per workload with the rows "before" and "after".
    """
    groups = tuple(
        Group(
            name=(
                f"{result.workload} ({format_count(result.num_nodes)} nodes, "
                f"{format_count(result.num_prompts)} held-out prompts)"
            ),
            rows=(_curve_row("before", result.before), _curve_row("after", result.after)),
        )
        for result in results
    )
    return Table(columns=("", "map", "ECE", "Brier score", "AUC"), groups=groups)


def search_table(results: Iterable[SearchResult]) -> Table:
    """How large each study was.

    Args:
        results: One per workload.

    Returns:
        One row per workload.
    """
    rows = []
    for result in results:
        times_us = [trial.time_per_token_us for trial in result.trials]
        feasible_us = [time_us for time_us in times_us if time_us is not None]
        rows.append(
            Row(
                head=result.workload,
                cells=(
                    Cell(text=format_count(len(result.trials))),
                    Cell(text=format_count(len(times_us) - len(feasible_us))),
                    Cell(text=format_us(min(feasible_us, default=None))),
                    Cell(text=format_count(result.num_positions)),
                    Cell(text=format_seconds(result.seconds)),
                ),
            )
        )
    columns = ("workload", "trials", "infeasible", "best time per token", "positions", "took")
    return Table(columns=columns, groups=(Group(name="", rows=tuple(rows)),) if rows else ())


def marginal_table(result: SearchResult) -> Table:
    """Time per token against each parameter of one study.

    Args:
        result: The study.

    Returns:
        One group per parameter, one row per value.
    """
    groups = tuple(
        Group(
            name=marginal.param,
            rows=tuple(
                Row(head=value, cells=(Cell(text=format_us(best)), Cell(text=format_us(median))))
                for value, best, median in zip(
                    marginal.values, marginal.best_us, marginal.median_us, strict=True
                )
            ),
        )
        for marginal in result.marginals
        if marginal.values
    )
    return Table(columns=("value", "best time per token", "median"), groups=groups)


def correctness_table(report: DemoReport) -> Table:
    """Counts of every exactness check; a check with unexcused differences is strong.

    Args:
        report: The data.

    Returns:
        One row per check.
    """
    rows = tuple(
        Row(
            head=check.name,
            cells=(
                Cell(text=check.setting),
                Cell(
                    text=f"{format_count(check.num_compared)} {check.unit}",
                    small=f"{format_count(check.num_prompts)} prompts" if check.num_prompts else "",
                ),
                Cell(text=format_count(check.num_equal)),
                Cell(text=format_count(check.num_near_ties), small=check.bound or ""),
                Cell(text=format_count(check.num_different)),
            ),
            strong=check.num_different > 0,
        )
        for check in report.correctness
    )
    columns = ("check", "setting", "compared", "equal", "near ties", "different")
    return Table(columns=columns, groups=(Group(name="", rows=rows),) if rows else ())


def stage_table(report: DemoReport) -> Table:
    """Where the run's time went, each stage with its share of the whole.

    Args:
        report: The data.

    Returns:
        One row per stage and the sum; no group if no stage was timed.
    """
    total_s = sum(stage.seconds for stage in report.stages)
    longest_s = max((stage.seconds for stage in report.stages), default=0.0)
    rows = [
        Row(
            head=stage.name,
            cells=(
                Cell(
                    text=format_seconds(stage.seconds),
                    share=100 * stage.seconds / longest_s if longest_s else 0.0,
                ),
                Cell(text=format_percent(stage.seconds / total_s if total_s else 0.0, 0)),
                Cell(text=stage.note or ""),
            ),
        )
        for stage in report.stages
    ]
    if rows:
        cells = (
            Cell(text=format_seconds(total_s)),
            Cell(text=format_percent(1.0, 0)),
            Cell(text=""),
        )
        rows.append(Row(head="all stages", cells=cells, strong=True))
    columns = ("stage", "wall time", "share", "what it did")
    return Table(columns=columns, groups=(Group(name="", rows=tuple(rows)),) if rows else ())


def _model_text(model: ModelIdentity) -> str:
    parts = [model.name]
    if model.description:
        parts.append(model.description)
    parts.append(f"sha256 {format_digest(model.digest)}")
    return ", ".join(parts)


def _listed(items: dict[str, str] | dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in items.items()) or NOT_RECORDED


def provenance_rows(report: DemoReport) -> tuple[tuple[str, str], ...]:
    """What every number of the page depends on.

    Args:
        report: The data.

    Returns:
        (name, text) pairs.
    """
    made = report.provenance
    threads = NOT_RECORDED if made.num_threads is None else str(made.num_threads)
    batch_size = NOT_RECORDED if made.batch_size is None else str(made.batch_size)
    digest = format_digest(report.costs.digest if report.costs else None)
    return (
        ("created", made.created.isoformat(sep=" ", timespec="seconds")),
        ("command", made.command),
        ("sgl-eagle commit", made.commit or NOT_RECORDED),
        ("engine", made.engine),
        ("device", made.device),
        ("CPU", made.cpu or NOT_RECORDED),
        ("threads", threads),
        ("dtype", made.dtype or NOT_RECORDED),
        ("attention backend", made.attention_backend or NOT_RECORDED),
        ("batch size", batch_size),
        ("target", _model_text(made.target)),
        ("draft", _model_text(made.draft)),
        ("sampling", made.sampling or NOT_RECORDED),
        ("prompts", "; ".join(f"{k}: {v}" for k, v in made.prompts.items()) or NOT_RECORDED),
        ("seeds", _listed(made.seeds)),
        ("cost table", f"sha256 {digest}"),
        ("versions", _listed(made.versions)),
        *made.details.items(),
    )
