"""Sizes that a policy may choose among are those whose cost was measured."""

from dataclasses import replace

import pytest
from cost_maker import make_grid, make_table

from sgl_eagle_harness.errors import PolicyConfigError
from sgl_eagle_harness.policies.measured_choices import check_draft_widths, check_verify_sizes

COSTS = replace(
    make_table(),
    target=make_grid("target", tokens=(1, 8, 16)),
    draft=make_grid("draft", tokens=(2, 8)),
)


def test_what_was_measured_is_accepted_up_to_both_ends():
    check_verify_sizes((1, 3, 16), COSTS)
    check_draft_widths("topk", 2, 8, COSTS)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((), r"verify_sizes must rise from 1 and hold at least one larger size, got \[\]"),
        ((1,), r"at least one larger size, got \[1\]"),
        ((2, 4), r"must rise from 1 .* got \[2, 4\]"),
        ((1, 4, 4), r"must rise .* got \[1, 4, 4\]"),
        ((1, 17), r"verify_sizes must be in the cost table's range \[1, 16\], got 1 to 17"),
    ],
    ids=str,
)
def test_sizes_without_a_choice_or_a_cost_are_refused(sizes, message):
    with pytest.raises(PolicyConfigError, match=message):
        check_verify_sizes(sizes, COSTS)


@pytest.mark.parametrize(("smallest", "largest"), [(1, 8), (2, 9)])
def test_draft_steps_without_a_cost_are_refused_by_name(smallest, largest):
    message = rf"widths must be in the cost table's range \[2, 8\], got {smallest} to {largest}"
    with pytest.raises(PolicyConfigError, match=message):
        check_draft_widths("widths", smallest, largest, COSTS)
