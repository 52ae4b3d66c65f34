"""Rounds that wait for nothing verify what rounds that ask the policy would."""

import numpy as np
import pytest
from fake_draft import BRANCHES, NUM_STEPS, install, make_batch

from sgl_eagle.plugin.foreseen_rounds import MAILS_KEPT, ForeseenRounds, decides_nothing
from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.plain import PlainPolicy
from sgl_eagle_harness.policies.static import EAGLE1_PATHS, StaticPolicy
from sgl_eagle_harness.types import BatchContext

pytestmark = pytest.mark.reference

NUM_DRAFT_TOKENS = 7
POLICY = Eagle2Spec(num_steps=NUM_STEPS, topk=BRANCHES, num_draft_tokens=NUM_DRAFT_TOKENS).build(
    None
)


@pytest.fixture
def make_worker(monkeypatch):
    pytest.importorskip("torch")
    return install(monkeypatch)


def asked(worker, requests):
    """Trees, columns and numbers of a round whose policy is asked after every level."""
    import torch

    from sgl_eagle.plugin.draft_steps import EagerSteps
    from sgl_eagle.plugin.drafter import StepwiseDrafter
    from sgl_eagle.plugin.host_transfer import HostTransfer
    from sgl_eagle.plugin.verify_input import MaskLayout, pack_trees, send_trees

    transfer = HostTransfer("cpu", NUM_STEPS)
    drafter = StepwiseDrafter(
        *(EagerSteps(worker, chooses=False), make_batch(requests, on_host=True), transfer),
        RoundClock(),
        speculating=np.ones(len(requests), np.bool_),
        num_steps=NUM_STEPS - 1,
    )
    drafter.meet_roots()
    context = BatchContext(
        batch_size=len(requests),
        context_len=drafter.context_len,
        num_pending=np.ones(len(requests), np.int64),
    )
    trees = grow_trees(drafter, POLICY, context)
    columns = POLICY.select_verify(trees, context)
    sent = send_trees(
        pack_trees(trees, columns, NUM_DRAFT_TOKENS),
        transfer,
        root_tokens=drafter.root_tokens,
        context_len=drafter.context_len,
        layout=MaskLayout(shows_prefix=True, buffer=torch.zeros(4096, dtype=torch.uint8)),
    )
    return trees, columns, sent


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
def test_a_round_that_waits_for_nothing_verifies_the_same(make_worker, captured):
    import torch

    from sgl_eagle.plugin.draft_graphs import DraftGraphs
    from sgl_eagle.plugin.draft_steps import EagerSteps
    from sgl_eagle.plugin.host_transfer import HostTransfer
    from sgl_eagle.plugin.verify_input import MaskLayout

    layout = MaskLayout(shows_prefix=True, buffer=torch.zeros(4096, dtype=torch.uint8))
    graphs = DraftGraphs(make_worker(), chooses=True, num_certain_steps=NUM_STEPS - 1)
    graphs.capture_trees(NUM_STEPS - 1, NUM_DRAFT_TOKENS, layout)
    rounds = ForeseenRounds(
        HostTransfer("cpu", 2 + MAILS_KEPT),
        num_steps=NUM_STEPS - 1,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        first_slot=2,
    )
    before = None
    for requests in ([3, 0, 4, 1], [2], [4, 2, 1], [0, 3], [1]):
        wanted_trees, wanted_columns, wanted = asked(make_worker(), requests)
        steps = graphs if captured else EagerSteps(make_worker(), chooses=True)
        batch = make_batch(requests, on_host=True)
        found, late = rounds.draft(steps, batch, layout, RoundClock())
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
    assert decides_nothing(POLICY)
    assert decides_nothing(StaticPolicy.chain(3))
    assert not decides_nothing(StaticPolicy(name="eagle1", paths=EAGLE1_PATHS))
    assert not decides_nothing(PlainPolicy())
