"""Rounds that wait for nothing verify what rounds that ask the policy would."""

import io
import itertools
from dataclasses import fields

import numpy as np
import pytest
from fake_draft import BRANCHES, NUM_STEPS, install, make_batch
from fake_requests import FakeRequest, make_result

from sgl_eagle.plugin.finished_step import DraftedTrees, FinishedStep
from sgl_eagle.plugin.foreseen_rounds import (
    MAILS_KEPT,
    ForeseenRounds,
)
from sgl_eagle.plugin.foreseen_trees import ForeseenTrees, note_common_sizes
from sgl_eagle.plugin.node_learner import NodeLearner
from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle.plugin.round_mail import RoundMail
from sgl_eagle.plugin.trace_frames import frame, read_message
from sgl_eagle.plugin.trace_messages import UnsentStep
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.static import StaticPolicy
from sgl_eagle_harness.types import BatchContext, TreeLimits

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
            # How large the trees are can be told before they are put together.
            everyone = np.ones(len(columns), np.bool_)
            whole = DraftedTrees(trees=trees, columns=columns, speculating=everyone)
            for size_of in ("num_drafted", "num_draft_tokens", "depths", "speculating"):
                assert getattr(drafted, size_of).tolist() == getattr(whole, size_of).tolist()
            assert "trees" not in vars(drafted)
            assert drafted.columns.tolist() == columns.tolist()
            valid = trees.valid
            assert drafted.trees.valid.tolist() == valid.tolist()
            assert drafted.trees.tokens[valid].tolist() == trees.tokens[valid].tolist()
        before = late, (wanted_trees, wanted_columns)


def some_mail(seed, num_rows=3):
    """Random trees of two levels and more, as a device may mail them."""
    layout = RoundMail(branches=BRANCHES, num_steps=NUM_STEPS)
    rng = np.random.default_rng(seed)
    mail = np.zeros((num_rows, layout.width), np.int32)
    for index in range(NUM_STEPS):
        level = layout.level(mail, index)
        level[:, 0] = rng.permuted(np.tile(np.arange(9).reshape(3, 3), (num_rows, 1, 1)), axis=2)
        level[:, 1] = (-rng.random(level[:, 1].shape, np.float32)).view(np.int32)
    for step in range(NUM_STEPS - 1):
        of = BRANCHES if step == 0 else BRANCHES**2
        columns = rng.permuted(np.tile(np.arange(of), (num_rows, 1)), axis=1)
        layout.frontier(mail, step)[:] = columns[:, :BRANCHES]
    return layout, mail


@pytest.mark.parametrize("fault", ["none", "no frontier", "no probability", "beyond"])
@pytest.mark.parametrize("depth", [1, 2, NUM_STEPS])
def test_sizes_are_those_of_the_trees_whatever_the_draft_lacks(fault, depth):
    layout, mail = some_mail(seed=depth)
    if fault == "no frontier":
        layout.frontier(mail, 0)[1, 1] = -1
    if fault == "no probability":
        layout.level(mail, depth - 1)[1, 1, 0] = np.array(-np.inf, np.float32).view(np.int32)
    if fault == "beyond":  # what a deeper round has left there
        layout.level(mail, NUM_STEPS - 1)[:, 1] = np.array(np.nan, np.float32).view(np.int32)
    limits = TreeLimits(num_steps=depth, topk=BRANCHES, num_draft_tokens=4 if depth > 1 else 3)
    found = ForeseenTrees(layout=layout, mail=mail, limits=limits)
    again = ForeseenTrees(layout=layout, mail=mail, limits=limits)
    trees = DraftedTrees(trees=again.trees, columns=again.columns, speculating=again.speculating)
    for size_of in ("num_drafted", "num_draft_tokens", "depths"):
        assert getattr(found, size_of).tolist() == getattr(trees, size_of).tolist()
    lacking = {"no frontier": depth > 1, "no probability": True, "beyond": depth == NUM_STEPS}
    assert (found.common_sizes is None) == lacking.get(fault, False)
    row, whole = found.row(1), trees.row(1)
    assert row.num_drafted.tolist() == whole.num_drafted.tolist() == [found.num_drafted[1]]
    valid = row.trees.valid
    assert row.trees.tokens[valid].tolist() == trees.trees.tokens[1][trees.trees.valid[1]].tolist()


def test_a_look_at_many_rounds_finds_what_each_would():
    def some_rounds():
        rounds = []
        for seed, depth in enumerate([2, 2, NUM_STEPS, 2, 2, 1, 1]):
            layout, mail = some_mail(seed, num_rows=1 + seed)
            if seed == 3:
                layout.frontier(mail, 0)[1, 1] = -1
            limits = TreeLimits(num_steps=depth, topk=BRANCHES, num_draft_tokens=3)
            rounds.append(ForeseenTrees(layout=layout, mail=mail, limits=limits))
        return rounds

    alone, together = some_rounds(), some_rounds()
    layout, mail = some_mail(7, num_rows=100)
    large = ForeseenTrees(layout=layout, mail=mail, limits=together[0].limits)
    there = DraftedTrees(
        trees=alone[0].trees, columns=alone[0].columns, speculating=alone[0].speculating
    )
    note_common_sizes([None, there, *together, large])
    assert "common_sizes" not in vars(large)
    # Those of the third row in a row look for themselves, since one of them lacks a node.
    assert ["common_sizes" in vars(each) for each in together] == [True] * 3 + [False] * 2 + [
        True
    ] * 2
    assert [each.common_sizes for each in together] == [each.common_sizes for each in alone]


@pytest.mark.parametrize("dense", [False, True], ids=["ordinary", "dense"])
def test_mail_in_a_frame_is_read_as_its_trees_are(dense):
    layout, mail = some_mail(seed=4)
    layout.frontier(mail, 0)[1, 1] = -1
    limits = TreeLimits(num_steps=3, topk=BRANCHES, num_draft_tokens=5)
    late = ForeseenTrees(layout=layout, mail=mail, limits=limits)
    there = DraftedTrees(trees=late.trees, columns=late.columns, speculating=late.speculating)
    mailed, sent = (
        read_message(
            io.BytesIO(
                b"".join(
                    frame(
                        UnsentStep(
                            numbers=[3, 1, 2],
                            counted=np.array([True, False, True]),
                            position=[4, 5, 6],
                            root_token=[7, 8, 9],
                            emitted=np.arange(6).reshape(3, 2),
                            num_accept_tokens=np.array([1, 2, 1]),
                            drafted=drafted,
                            dense=dense,
                        )
                    )
                )
            )
        )
        for drafted in (late, there)
    )
    for field in fields(sent):
        wanted = getattr(sent, field.name)
        assert getattr(mailed, field.name).tolist() == wanted.tolist(), field.name
    assert (sent.columns >= 0).any()


def test_trees_of_many_rounds_are_learnt_from_as_each_alone():
    rounds = [some_mail(seed) for seed in range(6)]
    limits = TreeLimits(num_steps=3, topk=BRANCHES, num_draft_tokens=5)
    rng = np.random.default_rng(0)
    texts = [rng.integers(9, size=(3, 4)).tolist() for _ in rounds]
    told = {}
    for together in (True, False):
        policy = told[together] = Told()
        learner = NodeLearner(policy, steps_between_lessons=len(rounds) + 1, steps_between_trees=1)
        for (layout, mail), text in zip(rounds, texts, strict=True):
            drafted = ForeseenTrees(layout=layout, mail=mail, limits=limits)
            if not together:
                drafted = DraftedTrees(
                    trees=drafted.trees, columns=drafted.columns, speculating=drafted.speculating
                )
            requests = [FakeRequest(f"r{row}") for row in range(len(mail))]
            learner.observe(finished(requests, drafted))
            for request, tokens in zip(requests, text, strict=True):
                request.output_ids += tokens
        learner.observe(finished([FakeRequest("r0")], None))
    assert len(told[True].nodes) == len(rounds)
    assert told[True].nodes == told[False].nodes
    assert any(1.0 in accepted for _, _, accepted in told[True].nodes)


class Told:
    def __init__(self):
        self.nodes = []

    def observe_nodes(self, depths, path_log_confidence, accepted):
        self.nodes.append((depths.tolist(), path_log_confidence.tolist(), accepted.tolist()))

    def observe_step(self, rows):
        pass


def finished(requests, drafted):
    return FinishedStep(
        requests=requests,
        counted=np.ones(len(requests), np.bool_),
        noted=drafted,
        kept=[0] * len(requests),
        result=make_result([[1]] * len(requests)),
        elapsed_us=None,
    )
