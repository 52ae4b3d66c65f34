"""Trees drafted ahead are those of a drafter that waits for every decision."""

import sys
from pathlib import Path

import numpy as np
import pytest
from fake_draft import BRANCHES, NUM_STEPS, install, make_batch

from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.policies.confidence_order import confidence_order
from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.price import PriceRules
from sgl_eagle_harness.policies.static import StaticPolicy
from sgl_eagle_harness.types import BatchContext

sys.path.insert(0, str(Path(__file__).parents[2] / "harness"))
from price_maker import make_policy

pytestmark = pytest.mark.reference

COMMON = {"num_steps": NUM_STEPS, "topk": BRANCHES, "widths": (1, 2, BRANCHES)}
POLICIES = {
    "eagle2": Eagle2Spec(num_steps=NUM_STEPS, topk=BRANCHES, num_draft_tokens=9).build(None),
    "eagle2-shallow": Eagle2Spec(num_steps=2, topk=BRANCHES, num_draft_tokens=5).build(None),
    "eagle2-roots": Eagle2Spec(num_steps=1, topk=BRANCHES, num_draft_tokens=3).build(None),
    "chain": StaticPolicy.chain(NUM_STEPS),
    "eagle2-narrow": Eagle2Spec(num_steps=NUM_STEPS, topk=2, num_draft_tokens=6).build(None),
    "price-few-children": make_policy(**(COMMON | {"topk": 2, "widths": (1, 2)})),
    "price": make_policy(**COMMON),
    "price-stops-soon": make_policy(**COMMON, price_tok_per_us=1 / 400),
    "price-drafts-on": make_policy(**COMMON, price_tok_per_us=1e-9),
    "price-narrow": make_policy(**(COMMON | {"widths": (2,)}), price_tok_per_us=1e-9),
    "price-together": make_policy(**COMMON, rows_share_rounds=True),
    "price-fixed": make_policy(**COMMON, rules=PriceRules(stop=False, adapt_width=False)),
}
FIELDS = ("tokens", "parents", "step_log_probs", "path_log_confidence", "handles")


class CountedSteps:
    """Draft steps, and how many of them ran."""

    def __init__(self, steps):
        self.steps, self.num_run = steps, 0
        self.chooses, self.topk = steps.chooses, steps.topk

    def start(self, batch):
        return self.steps.start(batch)

    def plan(self):
        self.steps.plan()

    def run_first(self, num_steps):
        self.num_run += num_steps
        self.steps.run_first(num_steps)

    def run(self, step):
        assert step == self.num_run
        self.num_run += 1
        self.steps.run(step)


@pytest.fixture
def make_worker(monkeypatch):
    pytest.importorskip("torch")
    return install(monkeypatch)


def draft(make_drafter, steps, policy, requests, *, broken, speculating):
    """Trees of one round grown level by level, those foreseen, and draft steps that it ran."""
    from sgl_eagle.plugin.host_transfer import HostTransfer

    steps = CountedSteps(steps)
    batch = make_batch(requests, on_host=True)
    batch.spec_info.topk_p[broken] = np.nan
    drafter = make_drafter(
        *(steps, batch, HostTransfer("cpu", NUM_STEPS), RoundClock()),
        speculating=np.array(speculating),
        num_steps=policy.limits.num_steps - 1,
    )
    drafter.meet_roots()
    context = BatchContext(
        batch_size=len(requests),
        context_len=drafter.context_len,
        num_pending=np.ones(len(requests), np.int64),
    )
    foreseen = drafter.foreseen_trees()
    return grow_trees(drafter, policy, context), foreseen, steps.num_run


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize("name", POLICIES)
def test_drafting_ahead_changes_no_tree(make_worker, name, captured):
    from functools import partial

    from sgl_eagle.plugin.ahead_drafter import AheadDrafter
    from sgl_eagle.plugin.draft_graphs import DraftGraphs
    from sgl_eagle.plugin.draft_steps import EagerSteps
    from sgl_eagle.plugin.drafter import StepwiseDrafter

    policy = POLICIES[name]
    make_ahead = partial(AheadDrafter, order=confidence_order(policy))
    order = confidence_order(policy)
    num_certain_steps = order.num_certain_steps
    graphs = DraftGraphs(
        make_worker(),
        chooses=True,
        topk=policy.limits.topk,
        num_certain_steps=num_certain_steps,
    )
    for requests, broken, speculating in (
        ([3, 0, 4, 1], [], [True] * 4),
        ([2], [], [True]),
        ([4, 2, 1], [1], [True, True, False]),
        ([0], [0], [True]),
    ):
        rows = {"broken": broken, "speculating": speculating}
        waiting = EagerSteps(make_worker(), chooses=False, topk=BRANCHES)
        wanted, nothing, num_needed = draft(StepwiseDrafter, waiting, policy, requests, **rows)
        assert nothing is None
        steps = graphs
        if not captured:
            steps = EagerSteps(make_worker(), chooses=True, topk=policy.limits.topk)
        found, foreseen, num_run = draft(make_ahead, steps, policy, requests, **rows)
        assert_same_trees(found, wanted)
        assert (foreseen is None) == (num_certain_steps < policy.limits.num_steps - 1)
        if foreseen is not None:
            assert_same_trees(foreseen, wanted)
        assert num_needed <= num_run
        if num_certain_steps == 0:
            assert num_run == min(num_needed + 1, policy.limits.num_steps - 1)


def assert_same_trees(found, wanted):
    assert found.level_starts == wanted.level_starts
    assert found.valid.tolist() == wanted.valid.tolist()
    assert (found.depths.tolist(), found.ranks.tolist()) == (
        wanted.depths.tolist(),
        wanted.ranks.tolist(),
    )
    for field in FIELDS:  # padding may hold anything
        pairs = ((getattr(trees, field)[trees.valid]).tolist() for trees in (found, wanted))
        assert next(pairs) == next(pairs), field


def test_the_policies_here_stop_narrow_and_go_on(make_worker):
    """Otherwise the test above would show little."""
    from sgl_eagle.plugin.draft_steps import EagerSteps
    from sgl_eagle.plugin.drafter import StepwiseDrafter

    depths, widths = set(), set()
    for name in ("price", "price-stops-soon", "price-drafts-on"):
        steps = EagerSteps(make_worker(), chooses=False, topk=BRANCHES)
        rows = {"broken": [], "speculating": [True] * 4}
        trees, *_ = draft(StepwiseDrafter, steps, POLICIES[name], [3, 0, 4, 1], **rows)
        depths.add(trees.depth)
        ends = [*trees.level_starts[1:], trees.num_nodes]
        widths |= {
            int(count) // BRANCHES
            for start, end in zip(trees.level_starts, ends, strict=True)
            for count in trees.valid[:, start:end].sum(axis=1)
        }
    assert len(depths) > 1
    assert widths >= {0, 1, 2, BRANCHES}
