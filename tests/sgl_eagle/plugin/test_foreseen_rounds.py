"""Rounds that wait for nothing verify what rounds that ask the policy would."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_draft import BRANCHES, NUM_STEPS, install, make_batch

from sgl_eagle.plugin.foreseen_rounds import (
    MAILS_KEPT,
    ForeseenRounds,
    decides_nothing,
    may_decide_nothing,
)
from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.plain import PlainPolicy
from sgl_eagle_harness.policies.static import EAGLE1_PATHS, StaticPolicy
from sgl_eagle_harness.types import BatchContext

sys.path.insert(0, str(Path(__file__).parents[2] / "harness"))
from plan_maker import make_plan

pytestmark = pytest.mark.reference


def eagle2(*limits):
    num_steps, topk, num_draft_tokens = limits
    return Eagle2Spec(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens).build(None)


POLICIES = {
    "eagle2": (eagle2(NUM_STEPS, BRANCHES, 7),),
    "narrow": (eagle2(NUM_STEPS, 2, 7),),
    "chain": (StaticPolicy.chain(NUM_STEPS),),
    "shallow-chain": (StaticPolicy.chain(2),),
    # Trees of another depth and size in every round, as a plan for each batch size asks for.
    "planned": (eagle2(NUM_STEPS, BRANCHES, 7), eagle2(1, BRANCHES, 3), eagle2(2, BRANCHES, 7)),
}


@pytest.fixture
def make_worker(monkeypatch):
    pytest.importorskip("torch")
    return install(monkeypatch)


def asked(worker, requests, policy):
    """Trees, columns and numbers of a round whose policy is asked after every level."""
    import torch

    from sgl_eagle.plugin.draft_steps import EagerSteps
    from sgl_eagle.plugin.drafter import StepwiseDrafter
    from sgl_eagle.plugin.host_transfer import HostTransfer
    from sgl_eagle.plugin.verify_input import MaskLayout, pack_trees, send_trees

    transfer = HostTransfer("cpu", NUM_STEPS)
    drafter = StepwiseDrafter(
        *(
            EagerSteps(worker, chooses=False, topk=BRANCHES),
            make_batch(requests, on_host=True),
            transfer,
        ),
        RoundClock(),
        speculating=np.ones(len(requests), np.bool_),
        num_steps=policy.limits.num_steps - 1,
    )
    drafter.meet_roots()
    context = BatchContext(
        batch_size=len(requests),
        context_len=drafter.context_len,
        num_pending=np.ones(len(requests), np.int64),
    )
    trees = grow_trees(drafter, policy, context)
    columns = policy.select_verify(trees, context)
    sent = send_trees(
        pack_trees(trees, columns, policy.limits.num_draft_tokens),
        transfer,
        root_tokens=drafter.root_tokens,
        context_len=drafter.context_len,
        layout=MaskLayout(shows_prefix=True, buffer=torch.zeros(4096, dtype=torch.uint8)),
    )
    return trees, columns, sent


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_round_that_waits_for_nothing_verifies_the_same(make_worker, name, captured):
    import torch

    from sgl_eagle.plugin.draft_graphs import DraftGraphs
    from sgl_eagle.plugin.draft_steps import EagerSteps
    from sgl_eagle.plugin.host_transfer import HostTransfer
    from sgl_eagle.plugin.verify_input import MaskLayout

    layout = MaskLayout(shows_prefix=True, buffer=torch.zeros(4096, dtype=torch.uint8))
    policies = POLICIES[name]
    limits = policies[0].limits
    graphs = DraftGraphs(
        make_worker(), chooses=True, topk=limits.topk, num_certain_steps=limits.num_steps - 1
    )
    for policy in policies:
        graphs.capture_trees(policy.limits.num_draft_tokens, layout)
    rounds = ForeseenRounds(HostTransfer("cpu", 2 + MAILS_KEPT), first_slot=2)
    before = None
    batches = ([3, 0, 4, 1], [2], [4, 2, 1], [0, 3], [1])
    for requests, policy in zip(batches, itertools.cycle(policies), strict=False):
        wanted_trees, wanted_columns, wanted = asked(make_worker(), requests, policy)
        steps = graphs
        if not captured:
            steps = EagerSteps(make_worker(), chooses=True, topk=limits.topk)
        batch = make_batch(requests, on_host=True)
        found, late = rounds.draft(steps, batch, layout, RoundClock(), limits=policy.limits)
        assert found.numbers.tolist() == wanted.numbers.tolist()
        size = len(wanted.mask)
        assert found.mask[:size].tolist() == wanted.mask.tolist()
        # The host asks one round later.
        if before is not None:
            last, (trees, columns) = before
            drafted = last()
            assert drafted.columns.tolist() == columns.tolist()
            valid = trees.valid
            assert drafted.trees.valid.tolist() == valid.tolist()
            assert drafted.trees.tokens[valid].tolist() == trees.tokens[valid].tolist()
        before = late, (wanted_trees, wanted_columns)


def test_only_policies_without_a_decision_are_foreseen():
    assert decides_nothing(eagle2(4, 3, 7))
    assert decides_nothing(StaticPolicy.chain(3))
    assert not decides_nothing(StaticPolicy(name="eagle1", paths=EAGLE1_PATHS))
    assert not decides_nothing(PlainPolicy())
    plan = make_plan()
    assert not decides_nothing(plan)
    assert may_decide_nothing(plan)
    assert not may_decide_nothing(PlainPolicy())
