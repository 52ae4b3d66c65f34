"""Cost tables as JSON."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import AwareDatetime, Field

from sgl_eagle_harness.cost_table import CostGrid, CostSetup, CostTable
from sgl_eagle_harness.errors import CostTableError
from sgl_eagle_harness.records import Record, load_record, save_record

COST_SCHEMA_VERSION: Literal[1] = 1

AxisValue = Annotated[int, Field(ge=0, le=2**24)]
"""Point of an axis; tables hold a row for every token count up to the last one."""


class HoldoutRecord(Record):
    """Stored form of `HoldoutError`.

    Attributes:
        num_cells: Grid cells predicted from their neighbours.
        median_relative: Median relative error; None without cells.
        max_relative: Largest relative error; None without cells.
    """

    num_cells: int = Field(ge=0)
    median_relative: float | None = Field(ge=0, allow_inf_nan=False)
    max_relative: float | None = Field(ge=0, allow_inf_nan=False)


class CurveRecord(Record):
    """Medians of one kind of pass.

    Attributes:
        num_tokens: [Mn] tokens a request.
        us: [Mb, Mn, Mc] median microseconds.
        holdout_error: Interpolation against cells left out, computed when the file is written.
    """

    num_tokens: list[AxisValue]
    us: list[list[list[float]]]
    holdout_error: HoldoutRecord


class CostFile(Record):
    """A cost table with its provenance.

    Attributes:
        schema_version: Version of this layout.
        setup: What was measured.
        batch_size: [Mb] axis that all curves share.
        context_len: [Mc] axis that all curves share.
        target: Target passes.
        draft: Draft steps.
        draft_extend: Draft-extends.
        decide_us: One policy decision.
        verify_select_us: Choosing and laying out the verified tree.
        extends_every_step: Whether every step ends with a draft-extend over what it verified.
        drafts_ahead: Whether draft steps run while the policy decides.
        rounds_in_a_row: Whether rounds were timed as they follow each other while serving.
        launch: The host's own time of launching rounds; None where launching is computing.
        num_repeats: Measurements behind each median.
        created: Time of measurement, with its zone.
        commit: Source revision, if known.
    """

    schema_version: Literal[1] = COST_SCHEMA_VERSION
    setup: CostSetup
    batch_size: list[AxisValue]
    context_len: list[AxisValue]
    target: CurveRecord
    draft: CurveRecord
    draft_extend: CurveRecord
    decide_us: float
    verify_select_us: float
    extends_every_step: bool = False
    drafts_ahead: bool = False
    rounds_in_a_row: bool = False
    launch: CurveRecord | None = None
    num_repeats: int = Field(ge=1)
    created: AwareDatetime
    commit: str | None = None

    @classmethod
    def from_table(
        cls,
        table: CostTable,
        *,
        num_repeats: int,
        created: AwareDatetime,
        commit: str | None = None,
    ) -> CostFile:
        """Wrap a measured table.

        Args:
            table: Measured table; its grids must share the batch and context axes.
            num_repeats: Measurements behind each median.
            created: Time of measurement, with its zone.
            commit: Source revision, if known.

        Returns:
            The record, with the interpolation error of every grid.

        Raises:
            CostTableError: If the grids have different batch or context axes.
        """
        grids = (table.target, table.draft, table.draft_extend)
        others = grids[1:] if table.launch is None else (*grids[1:], table.launch)
        for axis in ("batch_size", "context_len"):
            for grid in others:
                if not np.array_equal(getattr(grid, axis), getattr(grids[0], axis)):
                    raise CostTableError(f"target and {grid.kind} must share the {axis} axis")
        target, draft, draft_extend = (_curve_record(grid) for grid in grids)
        return cls(
            setup=table.setup,
            batch_size=table.target.batch_size.tolist(),
            context_len=table.target.context_len.tolist(),
            target=target,
            draft=draft,
            draft_extend=draft_extend,
            decide_us=table.decide_us,
            verify_select_us=table.verify_select_us,
            extends_every_step=table.extends_every_step,
            drafts_ahead=table.drafts_ahead,
            rounds_in_a_row=table.rounds_in_a_row,
            launch=None if table.launch is None else _curve_record(table.launch),
            num_repeats=num_repeats,
            created=created,
            commit=commit,
        )

    def to_table(self) -> CostTable:
        """Build the table that code uses.

        Returns:
            Checked table.

        Raises:
            CostTableError: If an axis or a latency is not usable; names the field.
        """

        def grid(kind: str, curve: CurveRecord) -> CostGrid:
            try:
                us = np.array(curve.us, np.float64)
            except ValueError as error:
                raise CostTableError(f"{kind}.us must be a full array: {error}") from error
            return CostGrid(
                kind=kind,
                batch_size=np.array(self.batch_size, np.int64),
                num_tokens=np.array(curve.num_tokens, np.int64),
                context_len=np.array(self.context_len, np.int64),
                us=us,
            )

        return CostTable(
            setup=self.setup,
            target=grid("target", self.target),
            draft=grid("draft", self.draft),
            draft_extend=grid("draft_extend", self.draft_extend),
            decide_us=self.decide_us,
            verify_select_us=self.verify_select_us,
            extends_every_step=self.extends_every_step,
            drafts_ahead=self.drafts_ahead,
            rounds_in_a_row=self.rounds_in_a_row,
            launch=None if self.launch is None else grid("launch", self.launch),
        )

    @property
    def sha256(self) -> str:
        """Digest of the record's JSON, which policies carry to say what they were tuned for."""
        # A table of before keeps its digest.
        since = set() if self.rounds_in_a_row else {"rounds_in_a_row"}
        if self.launch is None:
            since.add("launch")
        return hashlib.sha256(self.model_dump_json(exclude=since).encode()).hexdigest()


def load_cost_file(path: Path) -> CostFile:
    """Read and check a cost table.

    Args:
        path: JSON file.

    Returns:
        The record; `to_table()` cannot fail on it.

    Raises:
        CostTableError: If the file cannot be used; names file and field.
    """
    record = load_record(path, CostFile, CostTableError, schema_version=COST_SCHEMA_VERSION)
    try:
        record.to_table()
    except CostTableError as error:
        raise CostTableError(f"{path}: {error}") from error
    return record


def save_cost_file(path: Path, record: CostFile) -> None:
    """Write a cost table, whole or not at all.

    Args:
        path: JSON file.
        record: What to write.

    Raises:
        OutputError: If the file cannot be written.
    """
    save_record(path, record)


def _curve_record(grid: CostGrid) -> CurveRecord:
    error = grid.leave_out_error()
    measured = error.num_cells > 0
    return CurveRecord(
        num_tokens=grid.num_tokens.tolist(),
        us=grid.us.tolist(),
        holdout_error=HoldoutRecord(
            num_cells=error.num_cells,
            median_relative=error.median_relative if measured else None,
            max_relative=error.max_relative if measured else None,
        ),
    )
