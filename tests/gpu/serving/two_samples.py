"""Whether two samples of continuations come from one distribution."""

from __future__ import annotations

import numpy as np
from scipy.stats import chi2_contingency

MIN_EXPECTED = 5
"""Rarer continuations are counted together: below it the chi-square approximation fails."""


def homogeneity(first, second):
    """Chi-square test of two counters over the same outcomes."""
    outcomes = sorted(set(first) | set(second))
    table = np.array([[counter[outcome] for outcome in outcomes] for counter in (first, second)])
    expected = table.sum(axis=0) * table.sum(axis=1)[:, None] / table.sum()
    frequent = (expected >= MIN_EXPECTED).all(axis=0)
    table = np.column_stack([table[:, frequent], table[:, ~frequent].sum(axis=1)])
    table = table[:, table.sum(axis=0) > 0]
    if table.shape[1] < 2:
        raise ValueError("needs two outcomes that are frequent enough, got fewer")
    result = chi2_contingency(table, correction=False)
    return {
        "num_samples": int(table[1].sum()),
        "num_outcomes": int(table.shape[1]),
        "chi_square": float(result.statistic),
        "degrees": int(result.dof),
        "p_value": float(result.pvalue),
    }
