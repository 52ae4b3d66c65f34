"""Time of steps where the engine drafts while the policy decides."""

from dataclasses import replace

import numpy as np
import pytest

from sgl_eagle_tuner.step_time import StepLoads, time_steps


def test_a_draft_step_counts_as_far_as_it_outlasts_its_decision(cost_maker):
    costs = cost_maker(decide_us=5.0)
    step = float(costs.draft_step_us(1, 1, 10))
    loads = StepLoads(
        speculated=np.ones(3, np.bool_),
        context_len=np.full(3, 10.0),
        num_pending=np.ones(3, np.int64),
        widths=np.array([[1, 1], [1, 0], [0, 0]]),
        num_decisions=np.array([2, 2, 1]),
        num_draft_tokens=np.full(3, 2),
    )
    waits = time_steps(loads, costs, batch_size=1)
    ahead = time_steps(loads, replace(costs, drafts_ahead=True), batch_size=1)
    assert waits.draft_us == pytest.approx([2 * step, step, 0])
    widest = float(costs.draft_step_us(1, costs.draft.num_tokens[-1], 10))
    wasted = widest - 5 - costs.verify_select_us
    assert ahead.draft_us == pytest.approx([2 * (step - 5), step - 5 + wasted, wasted])
    assert ahead.decide_us.tolist() == waits.decide_us.tolist()
