"""Ranks that see other scores and ask for other prices draft, stop and verify alike."""

import importlib
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_draft import BRANCHES, NUM_STEPS, fake_step, install, make_batch
from two_ranks import run_on_two_ranks

from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle_harness.calibration import IdentityMap
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.policies.confidence_order import confidence_order
from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.online_plan import OnlinePlanPolicy
from sgl_eagle_harness.policies.plain import PlainPolicy
from sgl_eagle_harness.policies.planned import PlannedPolicy
from sgl_eagle_harness.policies.tier import SpeculationTier, TieredPolicy, choose_rows
from sgl_eagle_harness.types import BatchContext

sys.path.insert(0, str(Path(__file__).parents[2] / "harness"))
from plan_maker import make_plan, policy_of_round
from price_maker import make_policy

pytestmark = pytest.mark.reference

COMMON = {"num_steps": NUM_STEPS, "topk": BRANCHES, "widths": (1, 2, BRANCHES)}
OTHER_PRICES = (make_policy(**COMMON), make_policy(**COMMON, price_tok_per_us=1e-9))
EAGLE2 = Eagle2Spec(num_steps=NUM_STEPS, topk=BRANCHES, num_draft_tokens=9).build(None)
REQUESTS = [3, 0, 4, 1]


@pytest.fixture(scope="module", autouse=True)
def imported():
    """What ranks import, before there are ranks."""
    pytest.importorskip("torch")
    for name in ("ahead_drafter", "shared_decisions"):
        importlib.import_module(f"sgl_eagle.plugin.{name}")


def share_arrays(ranks):
    own = 1 if ranks.leads else 2
    arrays = (np.full((2, 3), own), np.array([own == 1, True]), np.array([own / 3]), np.empty(0))
    shared = [ranks.share(array) for array in arrays]
    texts = [ranks.share_text(text if ranks.leads else "other") for text in ("né", "", None)]
    clock = ranks.clock(lambda: 1000.0 * own)
    return [(each.dtype.str, each.tolist()) for each in shared], texts, clock()


def test_all_ranks_get_what_the_first_one_has():
    first, second = run_on_two_ranks(share_arrays)
    assert first == second
    arrays, texts, time = first
    assert [values for _, values in arrays] == [[[1] * 3] * 2, [True, True], [1 / 3], []]
    assert [dtype for dtype, _ in arrays] == ["<i8", "|b1", "<f8", "<f8"]
    assert texts == ["né", "", None]
    assert time == 1000.0


def test_one_rank_alone_sends_nothing():
    from sgl_eagle.plugin.ranks import Ranks
    from sgl_eagle.plugin.shared_decisions import share_decisions

    ranks = Ranks(SimpleNamespace(world_size=1, rank_in_group=0))
    array = np.arange(3)
    assert ranks.share(array) is array
    assert ranks.share_text("text") == "text"
    assert ranks.clock(lambda: 5.0)() == 5.0
    assert share_decisions(EAGLE2, ranks) is EAGLE2


def draft_round(ranks, policies, *, agree):
    """What one rank drafts and verifies, where the second one's scores are noisy."""
    import torch

    from sgl_eagle.plugin import compat
    from sgl_eagle.plugin.ahead_drafter import AheadDrafter
    from sgl_eagle.plugin.draft_steps import EagerSteps
    from sgl_eagle.plugin.host_transfer import HostTransfer
    from sgl_eagle.plugin.shared_decisions import share_decisions

    def noisy_step(worker, forward_batch, step):
        logits, hidden = fake_step(worker, forward_batch, step)
        noise = torch.rand(logits.shape, generator=torch.Generator().manual_seed(step))
        return logits + (0 if ranks.leads else 0.3) * noise, hidden

    policy = policies[0 if ranks.leads else -1]
    with pytest.MonkeyPatch.context() as patch:
        make_worker = install(patch)
        patch.setattr(compat, "run_draft_step", noisy_step)
        if agree:
            patch.setattr(compat, "tensor_parallel_group", lambda: ranks._group)
            policy = share_decisions(policy, ranks)
        drafter = AheadDrafter(
            EagerSteps(make_worker(), chooses=True, topk=BRANCHES),
            make_batch(REQUESTS, on_host=True),
            HostTransfer("cpu", NUM_STEPS),
            RoundClock(),
            speculating=np.ones(len(REQUESTS), np.bool_),
            num_steps=policy.limits.num_steps - 1,
            order=confidence_order(policy),
        )
        drafter.meet_roots()
        context = BatchContext(
            batch_size=len(REQUESTS),
            context_len=drafter.context_len,
            num_pending=np.ones(len(REQUESTS), np.int64),
        )
        tiers = [SpeculationTier() for _ in REQUESTS]
        speculating = choose_rows(policy, context, tiers)
        trees = grow_trees(drafter, policy, context)
        columns = policy.select_verify(trees, context)
    assert isinstance(policy, TieredPolicy) == isinstance(policies[0], TieredPolicy)
    numbers = (trees.tokens, trees.parents, trees.path_log_confidence)
    return [speculating.tolist(), columns.tolist(), *(each.tolist() for each in numbers)]


@pytest.mark.parametrize("policies", [OTHER_PRICES, (EAGLE2,)], ids=["price", "eagle2"])
def test_ranks_draft_and_verify_the_same_trees(policies):
    first, second = run_on_two_ranks(partial(draft_round, policies=policies, agree=True))
    assert first == second
    alone, differing = run_on_two_ranks(partial(draft_round, policies=policies, agree=False))
    assert first == alone, "the first rank decides as it would alone"
    assert alone != differing, "the second would do something else: otherwise this shows nothing"


def plan_rounds(ranks, *, agree):
    """Rounds that one rank plans, where the second one has learnt that nothing pays."""
    from sgl_eagle.plugin.shared_decisions import share_decisions

    plan = make_plan()
    if not ranks.leads:
        plan = make_plan(expected_drafts=((0.0,) * 4,) * 3)
    policy = OnlinePlanPolicy(plan, IdentityMap(), batch_edges=(1,))
    if agree:
        policy = share_decisions(policy, ranks)
    assert isinstance(policy, PlannedPolicy)
    names = []
    for batch_size in (1, 4, 64):
        rows = np.full(batch_size, 100)
        batch = BatchContext(batch_size=batch_size, context_len=rows, num_pending=rows)
        names.append(policy_of_round(policy, batch).name)
    return names


def test_all_ranks_take_the_plan_of_the_first():
    first, second = run_on_two_ranks(partial(plan_rounds, agree=True))
    assert first == second
    alone, differing = run_on_two_ranks(partial(plan_rounds, agree=False))
    assert first == alone
    assert set(differing) == {"plain"} != set(alone)


def test_a_policy_that_never_drafts_has_nothing_to_share():
    from sgl_eagle.plugin.ranks import Ranks
    from sgl_eagle.plugin.shared_decisions import share_decisions

    plain = PlainPolicy()
    ranks = Ranks(SimpleNamespace(world_size=2, rank_in_group=1))
    assert share_decisions(plain, ranks) is plain
