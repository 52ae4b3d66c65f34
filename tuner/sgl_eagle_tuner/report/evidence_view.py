"""Costs, calibration, search, correctness and provenance as text for the template."""

from __future__ import annotations

from collections.abc import Iterable

from sgl_eagle_tuner.report.analysis import CalibrationResult, ReliabilityCurve, SearchResult
from sgl_eagle_tuner.report.data import DemoReport, ModelIdentity
from sgl_eagle_tuner.report.format import (
    NOT_MEASURED,
    NOT_RECORDED,
    format_count,
    format_digest,
    format_number,
    format_percent,
    format_seconds,
    format_things,
    format_us,
)
from sgl_eagle_tuner.report.table import Cell, Group, Row, Table
from sgl_eagle_tuner.report.wording import COST_PART_NAMES


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


def calibration_table(results: Iterable[CalibrationResult]) -> Table:
    """ECE, Brier score and AUC before and after calibration.

    Args:
        results: One per workload.

    Returns:
        One row per workload.
    """
    rows = tuple(
        Row(
            head=result.workload,
            cells=(
                Cell(text=result.after.kind if result.after else NOT_MEASURED),
                *_score_cells(result),
                Cell(
                    text=format_count(result.num_nodes),
                    small=format_things(result.num_prompts, "prompt") if result.num_prompts else "",
                ),
            ),
        )
        for result in results
    )
    columns = (
        "workload",
        "map",
        *(f"{score} {when}" for score in ("ECE", "Brier", "AUC") for when in ("before", "after")),
        "nodes judged",
    )
    return Table(columns=columns, groups=(Group(name="", rows=rows),) if rows else ())


def _score_cells(result: CalibrationResult) -> list[Cell]:
    cells = []
    for before, after in zip(_scores(result.before), _scores(result.after), strict=True):
        cells.append(Cell(text=format_number(before, 3)))
        cells.append(Cell(text=format_number(after, 3), strong=after is not None))
    return cells


def _scores(curve: ReliabilityCurve | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if curve is None else (curve.ece, curve.brier, curve.auc)


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
        baselines = [
            (trial.time_per_token_us, trial.baseline)
            for trial in result.trials
            if trial.time_per_token_us is not None and trial.baseline is not None
        ]
        baseline_us, baseline = min(baselines, default=(None, ""))
        rows.append(
            Row(
                head=result.workload,
                cells=(
                    Cell(text=format_count(len(result.trials))),
                    Cell(text=format_count(len(times_us) - len(feasible_us))),
                    Cell(text=format_us(min(feasible_us, default=None))),
                    Cell(text=format_us(baseline_us), small=baseline),
                    Cell(text=format_count(result.num_positions)),
                    Cell(text=format_seconds(result.seconds)),
                ),
            )
        )
    columns = (
        "workload",
        "trials",
        "infeasible",
        "best time per token",
        "best baseline",
        "positions replayed",
        "took",
    )
    return Table(columns=columns, groups=(Group(name="", rows=tuple(rows)),) if rows else ())


def marginal_table(results: Iterable[SearchResult]) -> Table:
    """Time per token against each parameter.

    Args:
        results: One per workload.

    Returns:
        One group per workload and parameter, one row per value.
    """
    groups = tuple(
        Group(
            name=f"{result.workload}, {marginal.param}",
            rows=tuple(
                Row(head=value, cells=(Cell(text=format_us(best)), Cell(text=format_us(median))))
                for value, best, median in zip(
                    marginal.values, marginal.best_us, marginal.median_us, strict=True
                )
            ),
        )
        for result in results
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
                    small=format_things(check.num_prompts, "prompt") if check.num_prompts else "",
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
