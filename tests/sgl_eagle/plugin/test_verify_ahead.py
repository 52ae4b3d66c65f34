"""A verify pass prepared before its trees are known verifies the trees that come later."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

pytestmark = pytest.mark.reference


@pytest.fixture
def common(monkeypatch):
    """A stand-in for SGLang's module whose preparation and verification only note what they see."""

    def prepare(verify_input, pool, batch, target_worker):
        del pool, target_worker
        common.prepare_ct += 1
        batch.forward_mode = "verify"
        batch.input_ids = verify_input.draft_token
        batch.out_cache_loc = f"slots of {len(verify_input.draft_token)}"
        return SimpleNamespace(input_ids=batch.input_ids), True

    common = ModuleType("eagle_worker_common")
    common.prepare_ct = 0
    common.eagle_prepare_for_verify = prepare
    for name in ("sglang", "sglang.srt", "sglang.srt.speculative"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["sglang.srt.speculative"].eagle_worker_common = common
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.eagle_worker_common", common)
    from sgl_eagle.plugin import compat

    monkeypatch.setattr(compat, "make_verify_input", lambda **fields: SimpleNamespace(**fields))
    return common


def test_plain_rounds_verify_tokens_of_the_dtype_that_kernels_want():
    import torch

    from sgl_eagle.plugin import compat

    bonus_tokens = torch.tensor([7, 9], dtype=torch.int32)
    worker = SimpleNamespace(
        _build_trivial_verify_input=lambda batch: SimpleNamespace(draft_token=batch.bonus_tokens)
    )
    batch = SimpleNamespace(bonus_tokens=bonus_tokens)
    verify_input = compat.make_plain_input(worker, batch)
    assert verify_input.draft_token.dtype == torch.int64
    assert verify_input.draft_token.tolist() == [7, 9]


def test_the_pass_is_prepared_once_and_sees_the_trees(common):
    import torch

    from sgl_eagle.plugin.verify_ahead import make_verify_input, prepare_verify
    from sgl_eagle.plugin.verify_input import TreeTensors

    worker = SimpleNamespace(
        device="cpu", speculative_num_steps=5, topk=4, req_to_token_pool=None, target_worker=None
    )
    batch = SimpleNamespace(
        seq_lens=[7, 9],
        spec_info="drafts",
        forward_mode="decode",
        input_ids="old",
        out_cache_loc="older",
    )
    before = dict(vars(batch))
    mask = torch.zeros(64, dtype=torch.uint8)
    room = TreeTensors(numbers=torch.zeros((5, 2, 3), dtype=torch.int64), mask=mask)
    prepared = prepare_verify(worker, batch, room)
    assert vars(batch) == before
    trees = TreeTensors(numbers=torch.arange(30).view(5, 2, 3), mask=mask[:18])
    prepared.fill(trees)
    forward_batch, can_run_graph = common.eagle_prepare_for_verify(
        prepared.verify_input, None, batch, None
    )
    assert can_run_graph
    assert common.prepare_ct == 1
    assert forward_batch.input_ids.tolist() == list(range(6))
    assert prepared.verify_input.positions.tolist() == list(range(6, 12))
    assert prepared.verify_input.retrieve_next_token.tolist() == [[18, 19, 20], [21, 22, 23]]
    assert prepared.verify_input.spec_steps == 2
    assert batch.forward_mode == "verify"
    assert batch.out_cache_loc == "slots of 6"
    assert batch.spec_info is prepared.verify_input

    other = make_verify_input(worker, trees)
    common.eagle_prepare_for_verify(other, None, batch, None)
    assert common.prepare_ct == 2
    assert batch.input_ids is other.draft_token


@pytest.mark.parametrize(("name", "late"), [("TritonAttnBackend", True), ("FA3", False)])
def test_a_pass_waits_for_trees_where_preparing_it_reads_the_mask(monkeypatch, name, late):
    import torch

    from sgl_eagle.plugin import compat, tree_rounds
    from sgl_eagle.plugin.round_clock import RoundClock
    from sgl_eagle.plugin.verify_input import MaskLayout

    backends = {kind: type(kind, (), {}) for kind in ("TritonAttnBackend", "FA3")}
    module = ModuleType("triton_backend")
    module.TritonAttnBackend = backends["TritonAttnBackend"]
    parts = ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention")
    for part in parts:
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    monkeypatch.setitem(sys.modules, f"{parts[-1]}.triton_backend", module)
    target = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backends[name]()))
    assert compat.reads_mask_late(target) == late

    asked = []
    monkeypatch.setattr(tree_rounds, "prepare_verify", lambda *given: asked.append(given))
    rounds = object.__new__(tree_rounds.TreeRounds)
    rounds._worker = SimpleNamespace(plan_stream=None, device="cpu", target_worker=target)
    rounds._latest_size = 4
    layout = MaskLayout(shows_prefix=True, buffer=torch.zeros(64, dtype=torch.uint8))
    rounds._mask_layout = lambda _: layout
    states = SimpleNamespace(captured=True, use=lambda _: None)
    rounds._prepare_verify(states, SimpleNamespace(reqs=["one"]), RoundClock())
    assert bool(asked) == late
