"""What a policy that goes by a cost table may choose among: only what the table has measured."""

from __future__ import annotations

from sgl_eagle_harness.cost_table import CostGrid, CostTable
from sgl_eagle_harness.errors import PolicyConfigError


def check_verify_sizes(sizes: tuple[int, ...], costs: CostTable) -> None:
    """Refuse verify sizes that leave no choice, or whose cost is not known.

    Args:
        sizes: Sizes the target may verify, root included.
        costs: Measured latencies.

    Raises:
        PolicyConfigError: If the sizes do not rise from 1 to a larger one within the table.
    """
    if list(sizes) != sorted(set(sizes)) or len(sizes) < 2 or sizes[0] != 1:  # noqa: PLR2004
        raise PolicyConfigError(
            f"verify_sizes must rise from 1 and hold at least one larger size, got {list(sizes)}"
        )
    _check_measured("verify_sizes", sizes[0], sizes[-1], costs.target)


def check_draft_widths(name: str, smallest: int, largest: int, costs: CostTable) -> None:
    """Refuse draft steps whose cost is not known.

    Args:
        name: Parameter that says how many nodes a draft step may expand.
        smallest: The fewest.
        largest: The most.
        costs: Measured latencies.

    Raises:
        PolicyConfigError: If the table does not reach from the fewest to the most.
    """
    _check_measured(name, smallest, largest, costs.draft)


def _check_measured(name: str, smallest: int, largest: int, grid: CostGrid) -> None:
    measured = grid.num_tokens
    if smallest < measured[0] or largest > measured[-1]:
        raise PolicyConfigError(
            f"{name} must be in the cost table's range [{measured[0]}, {measured[-1]}], got "
            f"{smallest} to {largest}"
        )
