"""`sgl-eagle inflate`: the larger pair computes the same, and appears whole or not at all."""

import json
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors import safe_open

from sgl_eagle.cli import main
from sgl_eagle.reference.decode import Engine
from sgl_eagle.reference.inflate_weights import Inflation, ModelSizes
from sgl_eagle.reference.pair import SHIPPED_DRAFT, load_pair
from sgl_eagle_harness.errors import CheckpointError
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.types import TreeLimits

SMALL = "--hidden-size 96 --intermediate-size 160 --num-layers 10 --num-heads 8 --num-kv-heads 4"
TREE = Eagle2Policy(limits=TreeLimits(num_steps=4, topk=3, num_draft_tokens=10))


def inflate(target, draft, out, sizes=SMALL, *more):
    paths = ["--target", str(target), "--draft", str(draft), "--out", str(out)]
    return main(["inflate", *paths, *sizes.split(), "--dtype", "float32", "--quiet", *more])


def require_same_function(small, large, prompts, *, num_tokens=40):
    """Equal logits of target and draft, and equal trees: proposed, verified and accepted."""
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        outputs = [
            pair.target.forward(tokens, cache=pair.target.make_cache(len(prompt)), start=0)
            for pair in (small, large)
        ]
        logits = [
            pair.target.logits(output.hidden)
            for pair, output in zip((small, large), outputs, strict=True)
        ]
        require_close(*logits)
        assert torch.equal(logits[0].argmax(-1), logits[1].argmax(-1))
        heads = [
            draft_logits(pair, output, tokens)
            for pair, output in zip((small, large), outputs, strict=True)
        ]
        require_close(*heads)
        generations = [
            Engine(pair.target, pair.draft).generate(
                prompt, TREE, max_new_tokens=num_tokens, stop_tokens=frozenset()
            )
            for pair in (small, large)
        ]
        assert generations[0].tokens == generations[1].tokens
        counts = [[step.num_accept_tokens for step in one.steps] for one in generations]
        assert counts[0] == counts[1]


def require_close(found, wanted):
    """Equal but for the rounding of float32, which grows with the largest terms of a sum."""
    torch.testing.assert_close(found, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)


def draft_logits(pair, output, tokens):
    """Of the last position, fed back once so that the feedback is compared as well."""
    draft = pair.draft
    hidden = draft.fuse(output.features[0, -1:])
    for step in range(2):
        projection = draft.project(hidden, tokens[0, -1:], torch.tensor([step]))
        group = projection.q.shape[1] // projection.v.shape[1]
        attention = projection.v.repeat_interleave(group, dim=1)
        hidden, head_input = draft.finish(attention, projection.residual)
    return draft.head(head_input)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_the_larger_pair_computes_the_same(target_folder, tmp_path, kind, capsys):
    if kind == "eagle1":
        draft = tiny_models.write_good_draft(tmp_path / "draft")
    else:
        draft = tiny_models.write_draft(tmp_path / "draft")
    assert inflate(target_folder, draft, tmp_path / "new" / "large", SMALL, "--format", "json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["large"]
    small = load_pair(str(target_folder), draft, dtype="float32")
    large = load_pair(result["target"], Path(result["draft"]), dtype="float32")
    assert large.target.dims.num_layers == 10
    assert large.target.dims.hidden_size == large.draft.config.hidden_size == 96
    assert large.target.dims.head_dim == small.target.dims.head_dim
    parameters = (tensor.numel() for tensor in stored_tensors(Path(result["target"])).values())
    assert result["num_target_parameters"] == sum(parameters)
    prompts = [small.encode("w1 w2 w3"), small.encode("w40 w7 w30 w9 what")]
    require_same_function(small, large, map(list, prompts))


def test_a_reduced_vocabulary_and_copied_key_heads(tmp_path):
    sys.path.insert(0, str(Path(__file__).parents[1] / "sglang_cpu"))
    import tiny_pair

    tiny_pair.make_pair(tmp_path)
    sizes = (
        "--hidden-size 168 --intermediate-size 256 --num-layers 5 --num-heads 6 --num-kv-heads 6"
    )
    assert inflate(tmp_path / "target", tmp_path / "draft", tmp_path / "large", sizes) == 0
    small, large = (
        load_pair(str(folder / "target"), folder / "draft", dtype="float32")
        for folder in (tmp_path, tmp_path / "large")
    )
    # Two query heads shared each key head of the target; now each has its own copy.
    assert (small.target.dims.num_kv_heads, large.target.dims.num_kv_heads) == (2, 6)
    assert torch.equal(small.draft.draft_to_target, large.draft.draft_to_target)
    require_same_function(small, large, [list(range(5, 25))])


@pytest.mark.reference
@pytest.mark.slow
def test_smollm2_with_its_shipped_head(tmp_path):
    sizes = (
        "--hidden-size 640 --intermediate-size 3200 --num-layers 31 --num-heads 20 --num-kv-heads 5"
    )
    assert inflate("smollm2", SHIPPED_DRAFT, tmp_path / "large", sizes) == 0
    small = load_pair("smollm2", dtype="float32", lm_head="full")
    folder = tmp_path / "large"
    large = load_pair(str(folder / "target"), folder / "draft", dtype="float32", lm_head="full")
    prompt = list(small.encode("Name three rivers of Europe."))
    require_same_function(small, large, [prompt], num_tokens=24)
    two_stage = [
        load_pair(target, draft, dtype="float32", lm_head="two-stage").draft
        for target, draft in (
            ("smollm2", SHIPPED_DRAFT),
            (str(folder / "target"), folder / "draft"),
        )
    ]
    states = torch.randn(4, 576, generator=torch.Generator().manual_seed(0))
    widened = torch.nn.functional.pad(states, (0, 64))
    found = [
        draft.best_children(rows, 4)
        for draft, rows in zip(two_stage, (states, widened), strict=True)
    ]
    assert torch.equal(found[0][1], found[1][1])
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-4, rtol=0)


def stored_tensors(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def test_what_is_new_is_random_but_writes_nothing(target_folder, good_draft, tmp_path):
    assert inflate(target_folder, good_draft, tmp_path / "large") == 0
    tensors = stored_tensors(tmp_path / "large" / "target")
    gate = tensors["model.layers.9.mlp.gate_proj.weight"]
    assert gate[96:].std() > 0.01
    assert gate[:, 64:].std() > 0.01
    assert not tensors["model.layers.9.mlp.down_proj.weight"].any()
    assert not tensors["model.layers.2.self_attn.o_proj.weight"][64:].any()
    assert tensors["model.layers.2.self_attn.o_proj.weight"][:64].any()


def test_shards_hold_every_tensor_once(target_folder, good_draft, tmp_path, monkeypatch):
    monkeypatch.setattr("sgl_eagle.reference.inflate.SHARD_BYTES", 100_000)
    assert inflate(target_folder, good_draft, tmp_path / "large") == 0
    folder = tmp_path / "large" / "target"
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 5
    for name, file in index.items():
        with safe_open(folder / file, "pt") as shard:
            assert name in shard.keys()  # noqa: SIM118
    small = load_pair(str(target_folder), good_draft, dtype="float32")
    large = load_pair(str(folder), tmp_path / "large" / "draft", dtype="float32")
    require_same_function(small, large, [list(small.encode("w3 w4"))])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            "--hidden-size 32",
            "--hidden-size must be at least the target's 64, got --hidden-size=32",
        ),
        ("--intermediate-size 8", "--intermediate-size must be at least the target's 96"),
        ("--num-layers 7", "--num-layers must be at least the target's 8, got --num-layers=7"),
        ("--num-heads 6", "got --num-heads=6, --num-kv-heads=4"),
        ("--num-heads 20", "got --hidden-size=96, --num-heads=20"),
        ("--num-heads 2 --num-kv-heads 2", "--num-kv-heads must be at least 4 with 1 query heads"),
    ],
)
def test_impossible_sizes_are_named(target_folder, good_draft, tmp_path, capsys, changed, message):
    assert inflate(target_folder, good_draft, tmp_path / "large", f"{SMALL} {changed}") == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_draft_of_another_width_and_unknown_tensors_are_refused(target_folder, tmp_path, capsys):
    draft = tiny_models.write_draft(tmp_path / "draft")
    tiny_models.edit_tensors(draft, gate__weight=torch.zeros(3))
    assert inflate(target_folder, draft, tmp_path / "large") == 1
    assert "cannot enlarge the tensor gate.weight" in capsys.readouterr().err
    tiny_models.edit_json(draft / "config.json", target_hidden_size=32)
    assert inflate(target_folder, draft, tmp_path / "large") == 1
    assert "only a draft as wide as its target" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]


def test_a_key_head_is_copied_where_its_query_heads_do_not_fit():
    old = ModelSizes(hidden_size=12, intermediate_size=8, num_heads=6, num_kv_heads=2)
    options = {"model": "target", "dtype": torch.float32, "random": torch.Generator()}
    new = ModelSizes(hidden_size=20, intermediate_size=8, num_heads=10, num_kv_heads=5)
    inflation = Inflation(old, new, **options)
    keys = torch.arange(2.0)[:, None].expand(2, 12) + 1
    enlarged = inflation.enlarge("layers.0.self_attn.k_proj.weight", keys)
    # Three query heads to a key head, two fit: heads 0 and 1 go to the first copy, 2 to the second.
    assert enlarged[:4, 0].tolist() == [1, 1, 2, 2]
    queries = torch.arange(6.0)[:, None].expand(6, 12) + 1
    rows = inflation.enlarge("layers.0.self_attn.q_proj.weight", queries)[:, 0].tolist()
    assert [rows[place] for place in (0, 1, 2, 4, 5, 6)] == [1, 2, 3, 4, 5, 6]
    few = ModelSizes(hidden_size=12, intermediate_size=8, num_heads=6, num_kv_heads=3)
    with pytest.raises(CheckpointError, match="num_kv_heads must be at least 4 with 2 query heads"):
        Inflation(old, few, **options)
