"""Loading a pair, encoding prompts, and the last position of a context."""

import shutil

import pytest

torch = pytest.importorskip("torch", reason="needs torch installed")
pytest.importorskip("transformers", reason="needs transformers installed")

from sgl_eagle.reference.decode import Engine  # noqa: E402
from sgl_eagle.reference.loading import checkpoint_digest, load_target  # noqa: E402
from sgl_eagle.reference.measure import encode_prompts  # noqa: E402
from sgl_eagle.reference.pair import load_pair  # noqa: E402
from sgl_eagle.reference.profile import ProfileConfig, cost_setup, measure_costs  # noqa: E402
from sgl_eagle.reference.prompts import Prompt  # noqa: E402
from sgl_eagle_harness.errors import CheckpointError, CostTableError, PromptError  # noqa: E402
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy  # noqa: E402
from sgl_eagle_harness.policies.plain import PlainPolicy  # noqa: E402
from sgl_eagle_harness.types import TreeLimits  # noqa: E402
from sgl_eagle_kernels.packed_linear import rounds_inputs  # noqa: E402


def prompt_of(num_words):
    return Prompt(id="long", workload="qa", turns=(" ".join(["w5"] * num_words),))


def test_pair_knows_its_parts(loaded_pair, good_draft):
    assert loaded_pair.stop_tokens == {0}
    assert loaded_pair.target_identity.name == "target"
    assert loaded_pair.target_identity.dims["max_positions"] == 1024
    assert loaded_pair.draft_identity.name == "good"
    assert loaded_pair.draft_identity.sha256 == checkpoint_digest(
        good_draft / "config.json", good_draft / "model.safetensors"
    )
    tokens = loaded_pair.encode("w1 w2")
    assert loaded_pair.decode(tokens).split() == ["<user>", "w1", "w2", "<end>", "<bot>"]


def test_dtype_is_that_of_both(target_folder, good_draft):
    pair = load_pair(str(target_folder), good_draft, dtype="bfloat16")
    assert pair.target.dtype == pair.draft.fc.weight.dtype == torch.bfloat16
    assert pair.draft.embed_tokens.dtype == torch.bfloat16


def test_a_draft_in_bfloat16_on_a_cpu_has_int8_weights_unless_told_otherwise(
    target_folder, good_draft
):
    rounded, stored = (
        load_pair(str(target_folder), good_draft, dtype="bfloat16", draft_weights=draft_weights)
        for draft_weights in (None, "as-stored")
    )
    inputs_too = rounds_inputs()
    ending = " and inputs" if inputs_too else ""
    assert rounded.draft_identity.name == f"good, int8 weights{ending}"
    assert ("input_bits" in rounded.draft_identity.dims) == inputs_too
    assert rounded.draft_identity.dims["weight_bits"] == 8
    assert stored.draft_identity.name == "good"
    assert "weight_bits" not in stored.draft_identity.dims
    assert rounded.draft_identity.sha256 != stored.draft_identity.sha256
    assert rounded.target_identity == stored.target_identity
    hidden = rounded.draft.config.hidden_size
    x = torch.randn(3, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    products = [pair.draft.gate_up_proj(x) for pair in (rounded, stored)]
    assert not torch.equal(*products)
    torch.testing.assert_close(*products, rtol=0.1, atol=0.1)


def test_costs_with_int8_weights_are_refused_without_them(target_folder, good_draft):
    rounded, stored = (
        load_pair(str(target_folder), good_draft, dtype="bfloat16", draft_weights=draft_weights)
        for draft_weights in ("int8", "as-stored")
    )
    grid = ProfileConfig(
        num_tokens=(1, 2), widths=(1,), num_pending=(1,), context_len=(1,), num_repeats=1
    )
    costs = measure_costs(rounded, grid, on_cell=lambda: None)
    costs.require_setup(cost_setup(rounded))
    with pytest.raises(
        CostTableError, match=r"draft: measured on good, int8 weights .*, running good "
    ):
        costs.require_setup(cost_setup(stored))


def test_int8_weights_are_refused_where_there_are_none(target_folder, good_draft):
    with pytest.raises(CheckpointError, match=r"--draft-weights int8 needs .* got float32 on cpu"):
        load_pair(str(target_folder), good_draft, dtype="float32", draft_weights="int8")


def test_digest_changes_with_content_and_size(tmp_path, target_folder):
    first = load_target(str(target_folder), dtype=torch.float32).digest
    copy = shutil.copytree(target_folder, tmp_path / "copy")
    assert load_target(str(copy), dtype=torch.float32).digest == first
    config = copy / "config.json"
    config.write_text(config.read_text() + " ")
    assert load_target(str(copy), dtype=torch.float32).digest != first


def test_prompts_that_leave_no_room_are_refused_by_name(loaded_pair):
    (fits,) = encode_prompts(loaded_pair, [prompt_of(1011)], max_new_tokens=10)
    assert len(fits.tokens) == 1014
    with pytest.raises(PromptError, match=r"'long' has 1015 tokens.* at most 9, got 10"):
        encode_prompts(loaded_pair, [prompt_of(1012)], max_new_tokens=10)


def test_trees_may_reach_past_the_last_position(loaded_pair):
    (prompt,) = encode_prompts(loaded_pair, [prompt_of(1011)], max_new_tokens=10)
    engine = Engine(loaded_pair.target, loaded_pair.draft)
    texts = [
        engine.generate(
            list(prompt.tokens), policy, max_new_tokens=10, stop_tokens=frozenset()
        ).tokens
        for policy in (
            PlainPolicy(),
            Eagle2Policy(limits=TreeLimits(num_steps=12, topk=2, num_draft_tokens=16)),
        )
    ]
    assert len(texts[0]) == 10
    assert texts[0] == texts[1]
