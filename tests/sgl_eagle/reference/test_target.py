"""The lean forward pass against Hugging Face's own."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch installed")
pytest.importorskip("transformers", reason="needs transformers installed")

from sgl_eagle.reference.target import Target  # noqa: E402
from sgl_eagle_harness.errors import CheckpointError  # noqa: E402

FAMILIES = {
    "llama": {},
    "llama-biased": {"attention_bias": True},
    "llama-scaled-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama-tied": {"tie_word_embeddings": True},
    "llama-wide-heads": {"head_dim": 32},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_features_match_hugging_face(model_maker, family):
    model = model_maker(family.split("-")[0], **FAMILIES[family])
    target = Target(model, capture=(0, 3, 6))
    tokens = torch.randint(0, 24, (2, 11))
    cache = target.make_cache(32, batch_size=2)
    first = target.forward(tokens[:, :4], cache=cache, start=0)
    second = target.forward(tokens[:, 4:], cache=cache, start=4)
    with torch.no_grad():
        expected = model(tokens, output_hidden_states=True)
    hidden = torch.cat([first.hidden, second.hidden], dim=1)
    torch.testing.assert_close(target.logits(hidden), expected.logits, atol=2e-4, rtol=2e-4)
    wanted = torch.cat([expected.hidden_states[i] for i in (0, 3, 6)], dim=-1)
    features = torch.cat([first.features, second.features], dim=1)
    torch.testing.assert_close(features, wanted, atol=2e-4, rtol=2e-4)


def test_every_branch_of_a_tree_sees_only_its_own_path(model_maker):
    model = model_maker()
    target = Target(model)
    prefix, branches = [3, 1, 4, 1], [[5, 9, 2], [6, 5], [3, 5]]
    tokens = [7, *branches[0], *branches[1], *branches[2]]
    parents = [-1, 0, 1, 2, 0, 4, 0, 6]
    mask = torch.eye(8, dtype=torch.bool)
    depths = [0] * 8
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
            depths[node] = depths[parent] + 1
    cache = target.make_cache(16)
    target.forward(torch.tensor([prefix]), cache=cache, start=0)
    output = target.forward(
        torch.tensor([tokens]),
        cache=cache,
        start=4,
        positions=4 + torch.tensor(depths),
        mask=mask,
    )
    for leaf, branch in ((3, branches[0]), (5, branches[1]), (7, branches[2])):
        with torch.no_grad():
            expected = model(torch.tensor([[*prefix, 7, *branch]])).logits[0, -1]
        torch.testing.assert_close(
            target.logits(output.hidden[0, leaf]), expected, atol=2e-4, rtol=2e-4
        )


def test_compacted_cache_continues_as_if_the_path_had_been_decoded(model_maker):
    model = model_maker()
    target = Target(model)
    cache = target.make_cache(16)
    target.forward(torch.tensor([[3, 1, 4]]), cache=cache, start=0)
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    target.forward(
        torch.tensor([[1, 8, 9, 2]]),
        cache=cache,
        start=3,
        positions=torch.tensor([3, 4, 4, 5]),
        mask=mask,
    )
    cache.compact(3, torch.tensor([0, 2, 3]))
    output = target.forward(torch.tensor([[6]]), cache=cache, start=6)
    with torch.no_grad():
        expected = model(torch.tensor([[3, 1, 4, 1, 9, 2, 6]])).logits[0, -1]
    torch.testing.assert_close(target.logits(output.hidden[0, 0]), expected, atol=2e-4, rtol=2e-4)


def test_foreign_architectures_and_windows_are_refused(model_maker):
    model = model_maker()
    with pytest.raises(CheckpointError, match=r"captured hidden states must be in \[0, 6\]"):
        Target(model, capture=(7,))
    model.config.model_type = "mamba"
    with pytest.raises(CheckpointError, match="llama, mistral, qwen2, qwen3, got model_type='mam"):
        Target(model)
    window = model_maker("mistral")
    window.config.sliding_window = 8
    with pytest.raises(CheckpointError, match="sliding_window=8"):
        Target(window)
