"""Draft steps over static buffers: children, true parents, and padding rows that disturb nobody."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.reference

BRANCHES, NUM_STEPS, VOCABULARY, HIDDEN = 3, 3, 17, 4
ROOT_IDS = [[5, 1, 2], [7, 8, 9]]


def fake_step(worker, forward_batch, step):
    """A draft whose output depends on all that a step is given, with a cache of one number a slot.

    A branch's cache rows hold its tokens; what it reads is the sum over its own earlier slots.
    """
    import torch

    cache = worker.draft_runner.token_to_kv_pool.k_buffer[0]
    slots = forward_batch.out_cache_loc
    tokens = forward_batch.input_ids
    cache[slots] = tokens.float()
    own = worker.slots.view(-1, NUM_STEPS)[: len(tokens)]
    seen = cache[own[:, : step + 1]].sum(1)
    hidden = forward_batch.spec_info.hidden_states
    state = seen + 2 * hidden[:, 0] + 3 * forward_batch.positions
    logits = torch.sin(state[:, None] * torch.arange(1, VOCABULARY + 1))
    return logits, hidden * 0.5 + tokens[:, None]


@pytest.fixture
def make(monkeypatch):
    """Makes the buffers, worker and batch of some rows, padded with rows of zeros."""
    torch = pytest.importorskip("torch")
    from sgl_eagle.plugin import compat
    from sgl_eagle.plugin.draft_segment import DraftBuffers, place_roots, read_batch, start_round

    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    monkeypatch.setattr(compat, "tensor_parallel_group", lambda: alone)
    monkeypatch.setattr(compat, "run_draft_step", fake_step)

    def make_rows(rows, num_padding=0):
        buffers = DraftBuffers.allocate(
            num_rows=len(rows) + num_padding,
            branches=BRANCHES,
            topk=BRANCHES,
            num_steps=NUM_STEPS,
            hidden=(HIDDEN, torch.float32, "cpu"),
        )
        pool = SimpleNamespace(k_buffer=[torch.zeros(64)], v_buffer=[])
        table = torch.zeros((3, 40), dtype=torch.int32)
        for row in rows:
            first = 1 + row * BRANCHES * NUM_STEPS
            table[1 + row, 10 + row :][: BRANCHES * NUM_STEPS] = first + torch.arange(
                BRANCHES * NUM_STEPS
            )
        worker = SimpleNamespace(
            draft_runner=SimpleNamespace(token_to_kv_pool=pool),
            hot_token_id=None,
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            slots=buffers.slots,
        )
        batch = SimpleNamespace(
            seq_lens=torch.tensor([10 + row for row in rows]),
            req_pool_indices=torch.tensor([1 + row for row in rows]),
            spec_info=SimpleNamespace(
                topk_index=torch.tensor([ROOT_IDS[row] for row in rows]),
                topk_p=torch.tensor([[0.5, 0.25, 0.125]] * len(rows)),
                bonus_tokens=torch.tensor([3 + row for row in rows], dtype=torch.int32),
                hidden_states=torch.ones(len(rows), HIDDEN) * torch.tensor(rows)[:, None],
            ),
        )
        read_batch(buffers.first(len(rows)), batch)
        place_roots(buffers)
        start_round(worker, buffers)
        steps = SimpleNamespace(positions=buffers.positions, spec_info=SimpleNamespace())
        return worker, steps, buffers

    return make_rows


def run(worker, batch, buffers, step, nodes):
    import torch

    from sgl_eagle.plugin.draft_segment import run_segment

    nodes = torch.tensor(nodes)
    buffers.choice[: len(nodes), 0] = nodes
    buffers.choice[: len(nodes), 1] = nodes // BRANCHES
    run_segment(worker, batch, buffers, step)
    level = buffers.layout.level(buffers.mail, step + 1)[: len(nodes)].numpy()
    return level[:, 0], np.ascontiguousarray(level[:, 1]).view(np.float32)


def test_the_host_learns_all_of_the_roots_at_once(make):
    _, _, buffers = make([0, 1], num_padding=1)
    layout, mail = buffers.layout, buffers.mail[:2].numpy()
    level = layout.level(mail, 0)[:, :, 0]
    assert level[:, 0].tolist() == ROOT_IDS
    probs = np.exp(np.ascontiguousarray(level[:, 1]).view(np.float32))
    assert probs.tolist() == [[0.5, 0.25, 0.125]] * 2
    assert layout.lengths(mail).tolist() == [10, 11]
    assert layout.roots(mail).tolist() == [3, 4]


def test_no_part_of_the_mail_is_in_another():
    from sgl_eagle.plugin.round_mail import RoundMail

    layout = RoundMail(branches=BRANCHES, num_steps=NUM_STEPS)
    mail = np.zeros((2, layout.width), np.int32)
    layout.lengths(mail)[:] += 1
    layout.roots(mail)[:] += 1
    for index in range(NUM_STEPS):
        layout.level(mail, index)[:] += 1
    for step in range(NUM_STEPS - 1):
        layout.frontier(mail, step)[:] += 1
    assert (mail == 1).all()


def test_branches_have_slots_of_their_own_and_padding_has_none(make):
    _, _, buffers = make([0, 1], num_padding=1)
    slots = buffers.slots[:2].flatten().tolist()
    assert sorted(slots) == list(range(1, 1 + 2 * BRANCHES * NUM_STEPS))
    assert not buffers.slots[2].any()
    assert buffers.positions[: 2 * BRANCHES].tolist() == [10] * BRANCHES + [11] * BRANCHES


def test_a_padded_batch_drafts_what_each_request_drafts_alone(make):
    choices = [[[0, 1, 2], [2, 0, 1]], [[8, 0, 4], [1, 3, 6]]]
    together = make([0, 1], num_padding=2)
    alone = [make([row]) for row in (0, 1)]
    for step, nodes in enumerate(choices):
        ids, log_probs = run(*together, step, nodes)
        for row in (0, 1):
            alone_ids, alone_log_probs = run(*alone[row], step, [nodes[row]])
            assert ids[row].tolist() == alone_ids[0].tolist()
            assert log_probs[row] == pytest.approx(alone_log_probs[0])


def test_drafts_follow_their_true_parents(make):
    """Branch 0 goes on from branch 2: it must read branch 2's slots and hidden state."""
    moved, stayed = make([0]), make([0])
    for worker, batch, buffers in (moved, stayed):
        run(worker, batch, buffers, 0, [[0, 1, 2]])
    best_of_branch_2 = 2 * BRANCHES
    ids, _ = run(*moved, 1, [[best_of_branch_2, 0, 0]])
    wanted, _ = run(*stayed, 1, [[0, 0, best_of_branch_2]])
    assert ids[0, 0].tolist() == wanted[0, 2].tolist()


def test_children_are_log_probabilities_of_target_ids_in_falling_order(make):
    import torch

    worker, batch, buffers = make([1])
    worker.hot_token_id = torch.arange(VOCABULARY) * 3
    buffers.tokens[0, :BRANCHES] = torch.tensor(ROOT_IDS[1])
    ids, log_probs = run(worker, batch, buffers, 0, [[0, 1, 2]])
    assert (ids % 3 == 0).all()
    assert (np.diff(log_probs, axis=-1) <= 0).all()
    batch.positions.sub_(1)
    buffers.tokens[0, :BRANCHES] = torch.tensor(ROOT_IDS[1])
    logits, _ = fake_step(worker, batch, 0)
    best = logits.log_softmax(-1).topk(BRANCHES)
    assert log_probs[0].ravel().tolist() == pytest.approx(best.values.flatten().tolist(), rel=1e-5)
    assert ids[0].ravel().tolist() == (3 * best.indices).flatten().tolist()


def test_draft_steps_leave_the_batchs_draft_input_alone(monkeypatch):
    """A round that verifies no draft hands it on, to be joined with those of other requests."""
    torch = pytest.importorskip("torch")
    from sgl_eagle.plugin import compat

    def prepare_for_draft(draft_input, pool, batch, *rest):
        del pool, rest
        draft_input.num_tokens_per_req = BRANCHES
        return SimpleNamespace(spec_info=batch.spec_info), True

    names = ["sglang", "sglang.srt", "sglang.srt.speculative"]
    modules = {name: ModuleType(name) for name in [*names, f"{names[-1]}.eagle_worker_common"]}
    modules[f"{names[-1]}.eagle_worker_common"].prepare_for_draft = prepare_for_draft
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    hidden = torch.ones(2, HIDDEN)
    draft_input = SimpleNamespace(hidden_states=hidden, num_tokens_per_req=1)
    batch = SimpleNamespace(spec_info=draft_input)
    worker = SimpleNamespace(
        req_to_token_pool=None, draft_runner=None, topk=BRANCHES, speculative_num_steps=NUM_STEPS
    )
    forward_batch = compat.prepare_draft_batch(worker, batch)
    # As a draft step does.
    forward_batch.spec_info.hidden_states = hidden.repeat_interleave(BRANCHES, 0)
    assert batch.spec_info is draft_input
    assert draft_input.hidden_states is hidden
    assert (draft_input.num_tokens_per_req, forward_batch.spec_info.num_tokens_per_req) == (1, 3)
