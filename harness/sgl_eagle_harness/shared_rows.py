"""Arrays of the same value in every row, shared by all who ask: a round needs several of them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sgl_eagle_harness.types import BoolArray, IntArray


@lru_cache(maxsize=1024)
def same_truth(value: bool, num_rows: int) -> BoolArray:
    """One truth value in every row.

    Args:
        value: It.
        num_rows: B.

    Returns:
        [B] bool, which nobody can write.
    """
    rows = np.full(num_rows, value)
    rows.flags.writeable = False
    return rows


@lru_cache(maxsize=1024)
def same_count(value: int, num_rows: int) -> IntArray:
    """One integer in every row.

    Args:
        value: It.
        num_rows: B.

    Returns:
        [B] int64, which nobody can write.
    """
    rows = np.full(num_rows, value, np.int64)
    rows.flags.writeable = False
    return rows
