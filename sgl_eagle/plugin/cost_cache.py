"""Measured cost tables, kept for the next start of the same server."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

from sgl_eagle_harness.cost_file import CostFile, load_cost_file, save_cost_file
from sgl_eagle_harness.cost_table import CostSetup, CostTable
from sgl_eagle_harness.errors import CostTableError, OutputError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRange:
    """What a table must have measured.

    Attributes:
        batch_size: Largest batch.
        num_tokens: Largest verify size, root included.
        width: Nodes that the widest draft step expands.
        context_len: Longest context.
    """

    batch_size: int
    num_tokens: int
    width: int
    context_len: int

    def require_covered_by(self, table: CostTable) -> None:
        """Refuse a table that would be asked for what it has not measured.

        Args:
            table: Measured costs.

        Raises:
            CostTableError: Naming the axis, and how far it reaches.
        """
        for grid, num_tokens in (
            (table.target, self.num_tokens),
            (table.draft, self.width),
            (table.draft_extend, self.num_tokens),
        ):
            for name, largest in (
                ("batch_size", self.batch_size),
                ("num_tokens", num_tokens),
                ("context_len", self.context_len),
            ):
                axis = getattr(grid, name)
                if axis[0] > 1 or axis[-1] < largest:
                    raise CostTableError(
                        f"{grid.kind}.{name} must cover 1 to {largest}, got {axis[0]} to {axis[-1]}"
                    )


def cache_file(folder: Path, setup: CostSetup) -> Path:
    """Where the table of a setup is kept.

    Args:
        folder: Of the cache.
        setup: What is served.

    Returns:
        A name that follows from every field of the setup.
    """
    digest = hashlib.sha256(setup.model_dump_json().encode()).hexdigest()
    return folder / f"{digest[:24]}.json"


def read_cached(
    folder: Path, setup: CostSetup, wanted: CostRange, *, launches: bool
) -> CostFile | None:
    """The cached table of this setup.

    Args:
        folder: Of the cache.
        setup: What is served.
        wanted: What it must have measured.
        launches: Whether it must tell the host's own time of launching a round from the round's.

    Returns:
        The record; None if there is none, or if the one that is there is damaged, of another setup,
        too small or an earlier version's that measured less, which is logged with its reason.
    """
    path = cache_file(folder, setup)
    if not path.exists():
        return None
    try:
        record = load_cost_file(path)
        table = record.to_table()
        _require_rounds_in_a_row(table)
        if launches:
            _require_launches(table)
        table.require_setup(setup)
        wanted.require_covered_by(table)
    except CostTableError as error:
        logger.warning("SGL_EAGLE measures its costs anew: %s: %s", path, error)
        return None
    return record


def _require_rounds_in_a_row(table: CostTable) -> None:
    if not table.rounds_in_a_row:
        raise CostTableError(
            "rounds_in_a_row must be true, got false: an earlier version timed each round alone"
        )


def _require_launches(table: CostTable) -> None:
    if table.launch is None:
        raise CostTableError(
            "launch must be measured where the host runs ahead of the device, got None: an earlier "
            "version left it out"
        )


def write_cached(folder: Path, record: CostFile) -> Path | None:
    """Keep a table; a folder that cannot be written costs the next start some seconds, no more.

    Args:
        folder: Of the cache.
        record: Measured table.

    Returns:
        Where it is; None if it could not be written, which is logged.
    """
    path = cache_file(folder, record.setup)
    try:
        save_cost_file(path, record)
    except OutputError as error:
        logger.warning("SGL_EAGLE does not keep its cost table: %s", error)
        return None
    return path
