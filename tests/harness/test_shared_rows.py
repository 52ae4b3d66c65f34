"""One array for all who ask, which nobody can change."""

import numpy as np
import pytest

from sgl_eagle_harness.shared_rows import same_count, same_truth


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_every_row_has_the_value_and_its_type(num_rows):
    for rows, values, dtype in (
        (same_truth(True, num_rows), [True] * num_rows, np.bool_),
        (same_count(1, num_rows), [1] * num_rows, np.int64),
    ):
        assert rows.tolist() == values
        assert rows.dtype == dtype


def test_it_is_shared_and_cannot_be_written():
    rows = same_count(0, 3)
    assert same_count(0, 3) is rows
    with pytest.raises(ValueError, match="read-only"):
        rows[0] = 1
