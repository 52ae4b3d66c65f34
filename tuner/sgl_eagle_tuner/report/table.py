"""Tables as the template prints them: text only."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_eagle_tuner.report.base import Estimate
from sgl_eagle_tuner.report.format import (
    NOT_MEASURED,
    format_interval,
    format_number,
    format_ratio,
    format_us,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A table cell.

    Attributes:
        text: What it says.
        small: Second line in small print, empty if there is none.
        share: Width of a bar under the text in percent, None for no bar.
        strong: Whether the cell is to stand out.
    """

    text: str
    small: str = ""
    share: float | None = None
    strong: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A table row.

    Attributes:
        head: First cell.
        cells: The others.
        strong: Whether the row is to stand out.
    """

    head: str
    cells: tuple[Cell, ...]
    strong: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows under one heading.

    Attributes:
        name: Heading, empty if the table has one group only.
        rows: In order.
    """

    name: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table.

    Attributes:
        columns: Column heads, the first one included.
        groups: Groups of rows; those without rows are left out.
    """

    columns: tuple[str, ...]
    groups: tuple[Group, ...]


def estimate_cell(estimate: Estimate | None, digits: int = 1) -> Cell:
    """A number over its interval.

    Args:
        estimate: The number, or None.
        digits: Digits after the point.

    Returns:
        The cell.
    """
    value = None if estimate is None else estimate.value
    return Cell(text=format_number(value, digits), small=format_interval(estimate, digits))


def time_cell(estimate: Estimate | None) -> Cell:
    """A time in microseconds over its interval.

    Args:
        estimate: Microseconds, or None.

    Returns:
        The cell, each number in the unit that suits it.
    """
    if estimate is None:
        return Cell(text=NOT_MEASURED)
    if estimate.low is None or estimate.high is None:
        return Cell(text=format_us(estimate.value))
    interval = f"{format_us(estimate.low)} to {format_us(estimate.high)}"
    return Cell(text=format_us(estimate.value), small=interval)


def ratio_cell(gain: Estimate | None) -> Cell:
    """A speed ratio over its interval.

    Args:
        gain: The ratio, or None.

    Returns:
        The cell.
    """
    return Cell(text=format_ratio(gain), small=format_interval(gain, 2))
