"""Time of steps, where the engine waits for decisions and where it drafts meanwhile."""

from dataclasses import replace

import numpy as np
import pytest

from sgl_eagle_harness.round_shape import round_shapes, shape_us
from sgl_eagle_tuner.step_time import StepLoads, time_steps

DECIDE_US = 5.0
NUM_STEPS, TOPK = 3, 2


@pytest.fixture
def waiting(cost_maker):
    return cost_maker(decide_us=DECIDE_US)


@pytest.fixture
def ahead(waiting):
    return replace(waiting, drafts_ahead=True)


def make_loads(*, num_steps, num_decisions, num_certain_steps=0, chooses_tree=True, width=1):
    """Steps of so many levels each; of all but the first, `width` nodes are expanded."""
    further = np.array(num_steps)[:, None] - 1
    ones = np.ones(len(num_steps), np.int64)
    return StepLoads(
        speculated=ones > 0,
        context_len=10.0 * ones,
        num_pending=ones,
        widths=np.where(np.arange(NUM_STEPS - 1) < further, width, 0),
        num_decisions=np.array(num_decisions),
        num_certain_steps=num_certain_steps * ones,
        chooses_tree=chooses_tree & (ones > 0),
        num_draft_tokens=2 * ones,
    )


def test_a_draft_step_counts_as_far_as_it_outlasts_its_decision(waiting, ahead):
    step = float(waiting.draft_step_us(1, 1, 10))
    loads = make_loads(num_steps=[3, 2, 1], num_decisions=[2, 2, 1])
    waits = time_steps(loads, waiting, batch_size=1)
    runs_ahead = time_steps(loads, ahead, batch_size=1)
    assert waits.draft_us == pytest.approx([2 * step, step, 0])
    widest = float(waiting.draft_step_us(1, waiting.draft.num_tokens[-1], 10))
    wasted = widest - DECIDE_US - waiting.verify_select_us
    outlasted = step - DECIDE_US
    assert runs_ahead.draft_us == pytest.approx([2 * outlasted, outlasted + wasted, wasted])
    assert runs_ahead.decide_us.tolist() == waits.decide_us.tolist()


@pytest.mark.parametrize("chooses_tree", [True, False])
def test_steps_that_follow_without_a_decision_cost_none_where_drafts_run_ahead(
    waiting, ahead, chooses_tree
):
    step = float(waiting.draft_step_us(1, 1, 10))
    loads = make_loads(
        num_steps=[3, 2, 1],
        num_decisions=[2, 2, 1],
        num_certain_steps=NUM_STEPS - 1,
        chooses_tree=chooses_tree,
    )
    found = time_steps(loads, ahead, batch_size=1)
    assert found.draft_us == pytest.approx([2 * step, step, 0])
    select_us = waiting.verify_select_us if chooses_tree else 0.0
    assert found.decide_us.tolist() == [select_us] * 3
    # An engine that waits asks whatever the answer will be.
    waits = time_steps(loads, waiting, batch_size=1).decide_us
    assert waits == pytest.approx(np.array([2, 2, 1]) * DECIDE_US + waiting.verify_select_us)


def test_decisions_that_begin_after_a_certain_step_are_charged_from_there(waiting, ahead):
    step = float(waiting.draft_step_us(1, 1, 10))
    widest = float(waiting.draft_step_us(1, waiting.draft.num_tokens[-1], 10))
    wasted = widest - DECIDE_US - waiting.verify_select_us
    loads = make_loads(num_steps=[3, 2], num_decisions=[2, 2], num_certain_steps=1)
    found = time_steps(loads, ahead, batch_size=1)
    assert found.draft_us == pytest.approx([step + step - DECIDE_US, step + wasted])
    assert found.decide_us == pytest.approx([DECIDE_US + waiting.verify_select_us] * 2)


@pytest.mark.parametrize("drafts_ahead", [True, False])
def test_rounds_without_a_decision_take_what_a_plan_expects_of_their_shape(waiting, drafts_ahead):
    costs = replace(waiting, drafts_ahead=drafts_ahead)
    shapes = round_shapes(num_steps=NUM_STEPS, topk=TOPK, sizes=(2,))[1:]
    loads = make_loads(
        num_steps=[shape.num_steps for shape in shapes],
        # The engine that waits is charged for every level that a plan runs, for no other answer.
        num_decisions=[shape.num_steps - 1 for shape in shapes],
        num_certain_steps=NUM_STEPS - 1,
        chooses_tree=False,
        width=TOPK,
    )
    expected = shape_us(costs, shapes, topk=TOPK, batch_size=1, context_len=10.0)
    assert time_steps(loads, costs, batch_size=1).total_us == pytest.approx(expected)
