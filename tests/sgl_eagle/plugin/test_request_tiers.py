"""Who drafts: as when every request is asked in every round, whatever is not asked for."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_requests import FakeRequest

from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.policies.plain import PlainPolicy
from sgl_eagle_harness.policies.tier import SpeculationTier, choose_rows
from sgl_eagle_harness.shared_rows import same_count
from sgl_eagle_harness.types import TreeLimits

sys.path.insert(0, str(Path(__file__).parents[2] / "harness"))
from plan_maker import make_plan, policy_of_round
from price_maker import make_policy

pytestmark = pytest.mark.reference

EAGLE2 = Eagle2Policy(limits=TreeLimits(num_steps=3, topk=4, num_draft_tokens=8))


class Undecided(Eagle2Policy):
    """Every other request drafts, and nothing is promised."""

    confidence_order = None

    def should_speculate(self, batch):
        return np.arange(batch.num_rows) % 2 == 0


UNDECIDED = Undecided(limits=EAGLE2.limits)
ROUNDS = [
    *[(EAGLE2, "ab")] * 3,
    (PlainPolicy(), "ab"),
    (UNDECIDED, "ab"),
    *[(EAGLE2, "abc")] * 2,
    *[(make_policy(), "abc")] * 2,
    (EAGLE2, "abc"),
    (EAGLE2, "cd"),
    (PlainPolicy(), "cd"),
    (make_plan(), "cd"),
    (make_policy(), "dc"),
]


def batch_of(names):
    requests = [FakeRequest(name, output_ids=[50] * (7 + ord(name))) for name in names]
    return SimpleNamespace(reqs=requests, seq_lens_cpu=None)


def test_tiers_are_those_of_requests_that_are_asked_one_by_one():
    from sgl_eagle.plugin.request_tiers import RequestTiers

    tiers, alone, switch_ct = RequestTiers(), {}, 0
    for policy, names in ROUNDS:
        batch, num_unseen = batch_of(names), same_count(0, len(names))
        choice = tiers.choose(policy, batch, list(names), num_unseen)
        alone = {name: alone.get(name) or SpeculationTier() for name in names}
        before = sum(tier.switch_ct for tier in alone.values())
        context = choice.context(batch)
        wanted = policy_of_round(policy, context)
        rows = choose_rows(wanted, context, list(alone.values()))
        switch_ct += sum(tier.switch_ct for tier in alone.values()) - before
        assert choice.policy == wanted
        assert choice.speculating.tolist() == rows.tolist()
        assert (choice.everyone, choice.anyone) == (rows.all(), rows.any())
    assert tiers.take_switch_ct() == switch_ct > 0
    assert tiers.take_switch_ct() == 0
    tiers._forget_settled()
    assert {name: vars(tier) for name, tier in tiers._tiers.items()} == {
        name: vars(tier) for name, tier in alone.items()
    }


def test_a_batch_is_looked_at_where_a_policy_asks():
    from sgl_eagle.plugin.request_tiers import RequestTiers

    batch = batch_of("ab")
    del batch.seq_lens_cpu
    choice = RequestTiers().choose(EAGLE2, batch, ["a", "b"], np.array([0, 2]))
    assert choice.speculating.tolist() == [True, True]
    batch.seq_lens_cpu = None
    assert choice.context(batch).num_pending.tolist() == [1, 3]
    assert choice.context(batch).context_len.tolist() == [3 + 7 + ord(name) - 1 for name in "ab"]
