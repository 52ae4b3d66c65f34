"""From a cost table to what the report draws of it."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_eagle_harness.cost_table import CostGrid, CostTable
from sgl_eagle_tuner.report.analysis import CostCurve, CostError, CostPart, CostSection


def summarise_costs(table: CostTable, *, digest: str | None = None) -> CostSection:
    """Take every measured curve and the table's own error into the report.

    Args:
        table: Measured costs.
        digest: sha256 of the table's file, if it has one.

    Returns:
        One curve per kind of pass, batch size and context length, medians as measured; one error
        per kind of pass whose grid has inner points.
    """
    grids: Sequence[tuple[CostPart, CostGrid]] = (
        ("target", table.target),
        ("draft", table.draft),
        ("draft_extend", table.draft_extend),
    )
    return CostSection(
        curves=tuple(curve for part, grid in grids for curve in _curves(part, grid)),
        errors=tuple(
            CostError(
                part=part,
                num_cells=error.num_cells,
                median_rel_error=error.median_relative,
                max_rel_error=error.max_relative,
            )
            for part, grid in grids
            if (error := grid.leave_out_error()).num_cells
        ),
        decide_us=table.decide_us,
        verify_select_us=table.verify_select_us,
        digest=digest,
    )


def _curves(part: CostPart, grid: CostGrid) -> list[CostCurve]:
    return [
        CostCurve(
            part=part,
            batch_size=int(batch_size),
            context_len=int(context_len),
            num_tokens=tuple(int(count) for count in grid.num_tokens),
            median_us=tuple(float(us) for us in grid.us[batch_index, :, context_index]),
        )
        for batch_index, batch_size in enumerate(grid.batch_size)
        for context_index, context_len in enumerate(grid.context_len)
    ]
