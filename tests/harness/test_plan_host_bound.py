"""A plan on a made-up server whose host is slower than its device, in turn with larger batches.

Rounds of a row are those of SmolLM2-135M on an H200 in the middle of a context of 512
(2026-11-30); what the host launches and the scheduler takes are about what was served there.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from cost_maker import make_grid, make_setup
from plan_maker import shape_of
from tree_maker import make_batch

from sgl_eagle_harness.calibration import IdentityMap
from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.policies.learning import REFRESH_STEPS, VerifiedRows
from sgl_eagle_harness.policies.online_plan import OnlinePlanPolicy
from sgl_eagle_harness.policies.plan import PlanPolicy
from sgl_eagle_harness.round_shape import PLAIN_ROUND, shape_tokens

BATCHES, SIZES = (1, 4, 16, 64, 128), (1, 2, 4, 8, 16)
TARGET_US = (
    (1170, 2060, 2060, 2060, 2060),
    (1190, 2070, 2070, 2070, 2070),
    (1220, 2070, 2100, 2150, 2230),
    (1420, 3500, 3850, 4020, 4440),
    (1680, 5300, 5750, 6400, 7250),
)
EXTEND_US = (
    (4, 260, 265, 270, 275),
    (4, 270, 277, 289, 310),
    (4, 300, 325, 360, 460),
    (5, 420, 525, 700, 1050),
    (6, 600, 785, 1130, 1850),
)
DRAFT_STEP_US = (101, 112, 136, 215, 322)
PLAIN_LAUNCH_US, LAUNCH_US = 1150, 2500
SCHEDULER_US = {1: 500, 4: 550, 16: 650, 64: 1200, 128: 1800}
TOKEN_US = 1.5
"""What the scheduler takes longer for each draft that was kept."""
DRAFTS = (
    (0.0, 0.66, 0.84, 0.86, 0.86),
    (0.0, 0.66, 1.27, 1.51, 1.60),
    (0.0, 0.66, 1.48, 1.89, 2.12),
    (0.0, 0.66, 1.48, 2.12, 2.46),
    (0.0, 0.66, 1.48, 2.26, 2.71),
)


def make_costs() -> CostTable:
    launch_us = [[PLAIN_LAUNCH_US] + [LAUNCH_US] * 4] * len(BATCHES)
    steps_us = [[each, each] for each in DRAFT_STEP_US]

    def grid(kind, tokens, us):
        values = np.repeat(np.array(us, np.float64)[:, :, None], 2, axis=2)
        return make_grid(kind, batches=BATCHES, tokens=tokens, us=lambda *_: values)

    return CostTable(
        setup=make_setup(),
        target=grid("target", SIZES, TARGET_US),
        draft=grid("draft", (1, 4), steps_us),
        draft_extend=grid("draft_extend", SIZES, EXTEND_US),
        decide_us=600.0,
        verify_select_us=70.0,
        extends_every_step=True,
        drafts_ahead=True,
        rounds_in_a_row=True,
        launch=grid("launch", SIZES, launch_us),
    )


def make_plan(costs: CostTable) -> PlanPolicy:
    return PlanPolicy(num_steps=5, topk=4, verify_sizes=SIZES, expected_drafts=DRAFTS, costs=costs)


class Server:
    """Serves batches of one size after the other; its device does as the table says."""

    def __init__(self, plan, *, runs_ahead=True, seed=0):
        edges = tuple(2**power for power in range(8))
        self.policy = OnlinePlanPolicy(plan, IdentityMap(), batch_edges=edges)
        self.runs_ahead = runs_ahead
        self._plan, self._rng = plan, np.random.default_rng(seed)
        self._tokens = dict(
            zip(plan.shapes, shape_tokens(plan.shapes, np.array(DRAFTS), SIZES), strict=True)
        )

    def round_us(self, batch_size, shape):
        """Times of a round of device and host."""
        row_us = self._plan.shape_us(batch_size, 256)[self._plan.shapes.index(shape)]
        launch_us = LAUNCH_US if shape.num_steps else PLAIN_LAUNCH_US
        kept = batch_size * (self._tokens[shape] - 1)
        return row_us, launch_us + SCHEDULER_US[batch_size] + TOKEN_US * kept

    def speed(self, batch_size, shape):
        """Tokens a microsecond, as a server reaches them."""
        device_us, host_us = self.round_us(batch_size, shape)
        us = max(device_us, host_us) if self.runs_ahead else device_us + host_us
        return batch_size * self._tokens[shape] / us

    def best_speed(self, batch_size):
        return max(self.speed(batch_size, shape) for shape in self._plan.shapes)

    def _keep(self, shape, batch_size):
        # Of each row the levels whose draft is right, as often as the shallower trees add drafts.
        column = SIZES.index(shape.num_draft_tokens)
        levels = np.diff([0.0, *(row[column] for row in DRAFTS[: shape.num_steps])])
        return (self._rng.random(batch_size)[:, None] < levels).sum(axis=1)

    def serve(self, batch_size, num_rounds):
        """Shapes that ran."""
        shapes = []
        for _ in range(num_rounds):
            shape = shape_of(self.policy, make_batch(batch_size, batch_size=batch_size))
            shapes.append(shape)
            device_us, host_us = self.round_us(batch_size, shape)
            device_us *= self._rng.uniform(0.97, 1.03)
            host_us *= self._rng.lognormal(0, 0.08)
            kept = self._keep(shape, batch_size)
            self.policy.observe_step(
                VerifiedRows.of_rows(
                    batch_size=batch_size,
                    elapsed_us=max(device_us, host_us) if self.runs_ahead else device_us + host_us,
                    host_bound=host_us > device_us or not self.runs_ahead,
                    depths=np.full(batch_size, shape.num_steps),
                    num_draft_tokens=np.full(batch_size, shape.num_draft_tokens),
                    num_correct_drafts=kept,
                )
            )
        return shapes


@pytest.mark.parametrize("batch_size", BATCHES)
def test_it_finds_the_best_shape_within_a_few_refreshes_and_stays(batch_size):
    server = Server(make_plan(make_costs()))
    server.serve(batch_size, 3 * REFRESH_STEPS)
    shapes = server.serve(batch_size, 20 * REFRESH_STEPS)
    reached = np.mean([server.speed(batch_size, shape) for shape in shapes])
    assert reached > 0.98 * server.best_speed(batch_size)
    running = server.policy.running_shape
    assert shapes.count(running) > 0.95 * len(shapes)  # the others are trials


@pytest.mark.parametrize("batch_size", [64, 128])
def test_a_table_that_knows_nothing_of_the_scheduler_would_decode_plainly(batch_size):
    server = Server(make_plan(make_costs()))
    assert server.serve(batch_size, 1) == [PLAIN_ROUND]
    best = max(server._plan.shapes, key=lambda shape: server.speed(batch_size, shape))
    assert best.num_steps == 5
    gained = server.speed(batch_size, best) / server.speed(batch_size, PLAIN_ROUND)
    assert gained > 1.05


def test_what_was_learnt_at_one_batch_size_holds_when_it_comes_back():
    server = Server(make_plan(make_costs()))
    for batch_size in (128, 1, 64):
        server.serve(batch_size, 5 * REFRESH_STEPS)
    for batch_size in (128, 64, 1, 16):
        shapes = server.serve(batch_size, 2 * REFRESH_STEPS)
        reached = np.mean([server.speed(batch_size, shape) for shape in shapes])
        assert reached > 0.96 * server.best_speed(batch_size)
    # Of 128 and 64 requests plain rounds were seen, of one it drafts and waits for nobody.
    for batch_size, drafts in ((128, False), (64, False), (1, True)):
        expected = SCHEDULER_US[batch_size]
        found = server.policy._times.scheduler_us(batch_size, drafts=drafts)
        assert expected * 0.8 < found < expected * 1.1


def test_a_device_that_takes_longer_than_its_host_is_planned_as_without_one():
    costs = make_costs()
    slow = replace(
        costs,
        target=replace(costs.target, us=costs.target.us + 5000.0),
    )
    server, shapes = Server(make_plan(slow)), []
    for batch_size in BATCHES:
        shapes += server.serve(batch_size, 5 * REFRESH_STEPS)[REFRESH_STEPS:]
        assert server.policy.scheduler_us(batch_size) == 0
        assert server.policy.running_shape == make_plan(slow).round_shape(batch_size, 256)


@pytest.mark.parametrize("batch_size", [1, 128])
def test_where_host_and_device_take_turns_the_scheduler_adds_to_every_round(batch_size):
    plan = make_plan(replace(make_costs(), launch=None))
    server = Server(plan, runs_ahead=False)
    # Launching is part of what the table measured there.
    server.round_us = lambda batch, shape: (
        plan.shape_us(batch, 256)[plan.shapes.index(shape)],
        float(SCHEDULER_US[batch]),
    )
    server.serve(batch_size, 10 * REFRESH_STEPS)
    learnt = server.policy.scheduler_us(batch_size)
    assert learnt == pytest.approx(SCHEDULER_US[batch_size], rel=0.1)
    drafts = server.policy.running_shape.num_steps > 0
    alike = np.array([(shape.num_steps > 0) == drafts for shape in plan.shapes])
    wanted = plan.shape_us(batch_size, 256)[alike] + learnt
    assert server.policy.shape_us(batch_size, 256)[alike] == pytest.approx(wanted, rel=0.05)


def test_a_table_that_is_off_shows_in_rounds_that_the_device_decides():
    costs = make_costs()
    costs = replace(costs, target=replace(costs.target, us=costs.target.us * 4))
    halved = replace(costs, target=replace(costs.target, us=costs.target.us / 2))
    server = Server(make_plan(halved))
    truth = make_plan(costs)
    server.round_us = lambda batch, shape: (
        truth.shape_us(batch, 256)[truth.shapes.index(shape)],
        1000.0,
    )
    assert server.policy.table_ratio is None
    server.serve(128, 3 * REFRESH_STEPS)
    assert server.policy.num_refreshes == 3  # the first was early, the fourth is not due
    assert server.policy.table_ratio > 1.4


def test_rounds_that_take_their_launch_and_little_more_say_nothing_about_the_table():
    server = Server(make_plan(make_costs()))
    server.round_us = lambda _, shape: (5000.0, 4000.0 + shape.num_steps)
    server.serve(4, 5 * REFRESH_STEPS)  # at 2.5 ms by the table, of which 2.5 are the host's
    assert server.policy.num_refreshes >= 4
    assert server.policy.table_ratio is None


def test_rounds_of_a_host_that_is_slower_say_nothing_about_the_table():
    server = Server(make_plan(make_costs()))
    server.round_us = lambda _, shape: (100.0, 9000.0 + shape.num_steps)
    server.serve(4, 5 * REFRESH_STEPS)
    assert server.policy.num_refreshes >= 4
    assert server.policy.table_ratio is None


def test_the_first_refresh_of_a_batch_size_comes_early():
    server = Server(make_plan(make_costs()))
    for batch_size in (64, 128):
        shapes = server.serve(batch_size, 60)
        assert shapes[0] == PLAIN_ROUND or batch_size == 128  # which 64 has told of
        assert shapes[-1].num_steps == 5


@pytest.mark.parametrize("batch_size", [64, 128])
def test_it_learns_where_prefills_come_between(batch_size):
    # Every fourth step follows a prefill, which the one before was launched ahead of.
    server, count = Server(make_plan(make_costs())), itertools.count()
    observe = server.policy.observe_step

    def observe_between_prefills(rows):
        turn = next(count) % 4
        if turn == 0:
            rows = replace(rows, elapsed_us=None)
        elif turn == 3:
            rows = replace(rows, elapsed_us=rows.elapsed_us + 3000.0, host_bound=None)
        observe(rows)

    server.policy.observe_step = observe_between_prefills
    server.serve(batch_size, 3 * REFRESH_STEPS)
    expected = SCHEDULER_US[batch_size]
    found = server.policy._times.scheduler_us(batch_size, drafts=False)
    assert 0.8 * expected < found < 1.1 * expected
    assert server.policy.running_shape.num_steps == 5


def test_what_drafting_takes_the_scheduler_keeps_no_plain_round_from_being_tried():
    # As on a host for which few requests are slow, and a plain round of many is not.
    server = Server(make_plan(make_costs()))
    truth = make_plan(make_costs())
    server.round_us = lambda batch, shape: (
        truth.shape_us(batch, 256)[truth.shapes.index(shape)],
        LAUNCH_US + 1200.0 if shape.num_steps else PLAIN_LAUNCH_US + 100.0,
    )
    for batch_size in (1, 4, 16, 64):
        server.serve(batch_size, 3 * REFRESH_STEPS)
    assert server.policy._times.scheduler_us(64, drafts=True) > 1000
    shapes = server.serve(64, 3 * REFRESH_STEPS)
    assert server.policy.running_shape == PLAIN_ROUND
    assert shapes.count(PLAIN_ROUND) > 0.95 * len(shapes)


def test_a_machine_that_was_busy_for_a_moment_does_not_end_plain_decoding_for_long():
    server = Server(make_plan(make_costs()))
    truth, slowed_us = server._plan, [2500.0]
    server.round_us = lambda batch, shape: (
        truth.shape_us(batch, 256)[truth.shapes.index(shape)],
        LAUNCH_US + 1200.0 if shape.num_steps else PLAIN_LAUNCH_US + slowed_us[0],
    )
    server.serve(64, REFRESH_STEPS)
    assert server.policy.running_shape.num_steps == 5
    slowed_us[0] = 100.0
    shapes = server.serve(64, 8000)  # of 5 ms
    assert server.policy.running_shape == PLAIN_ROUND
    assert shapes.index(PLAIN_ROUND) < 7000


def test_a_plain_round_that_is_still_slow_is_tried_for_a_few_rounds():
    server = Server(make_plan(make_costs()))
    server.serve(128, REFRESH_STEPS)
    shapes = server.serve(128, 20_000)
    reached = np.mean([server.speed(128, shape) for shape in shapes])
    assert reached > 0.99 * server.best_speed(128)
