import math

import pytest

torch = pytest.importorskip("torch")

from sgl_eagle.reference.chain_attention import (  # noqa: E402
    attend_prefix_and_chain,
    attend_rows_and_chain,
)
from sgl_eagle.reference.draft_chain import run_chain  # noqa: E402
from sgl_eagle.reference.draft_config import parse_draft_config  # noqa: E402
from sgl_eagle.reference.draft_models import build_draft  # noqa: E402
from sgl_eagle.reference.head_loss import soft_cross_entropy  # noqa: E402
from sgl_eagle.reference.ordered_attention import with_ones  # noqa: E402

pytestmark = pytest.mark.reference
D = 16


def softmax_attention(q, keys, values):
    return (keys @ q / math.sqrt(D)).softmax(dim=0) @ values


@pytest.mark.parametrize(
    ("roots", "width", "length", "chain"), [(1, 1, 1, 1), (1, 5, 7, 3), (4, 3, 9, 2)], ids=str
)
@pytest.mark.parametrize("masked", [False, True])
def test_every_query_attends_to_what_it_sees(roots, width, length, chain, masked):
    torch.manual_seed(0)
    q = torch.randn(roots, width, 4, D)
    prefix_k, prefix_v = torch.randn(2, length, 2, D)
    chain_k, chain_v = torch.randn(2, roots, width, chain, 2, D)
    prefix_visible = torch.rand(roots, length) > 0.4 if masked else None
    out = attend_prefix_and_chain(
        q, prefix_k, with_ones(prefix_v), prefix_visible, chain_k, with_ones(chain_v)
    )
    for root in range(roots):
        seen = prefix_visible[root] if masked else slice(None)
        for query in range(width):
            for head in range(4):
                keys = [prefix_k[seen, head // 2], chain_k[root, query, :, head // 2]]
                values = [prefix_v[seen, head // 2], chain_v[root, query, :, head // 2]]
                expected = softmax_attention(
                    q[root, query, head], torch.cat(keys), torch.cat(values)
                )
                torch.testing.assert_close(out[root, query, head], expected, atol=1e-5, rtol=1e-5)


def test_rows_see_their_past_and_their_own_chain():
    torch.manual_seed(0)
    q = torch.randn(2, 5, 4, D)
    prefix_k, prefix_v = torch.randn(2, 2, 5, 2, D)
    chain_k, chain_v = torch.randn(2, 3, 2, 5, 2, D)
    out = attend_rows_and_chain(q, prefix_k, prefix_v, list(chain_k), list(chain_v))
    for row in range(2):
        for index in range(5):
            for head in range(4):
                keys = [prefix_k[row, : index + 1, head // 2], chain_k[:, row, index, head // 2]]
                values = [prefix_v[row, : index + 1, head // 2], chain_v[:, row, index, head // 2]]
                expected = softmax_attention(
                    q[row, index, head], torch.cat(keys), torch.cat(values)
                )
                torch.testing.assert_close(out[row, index, head], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"])
def test_training_chain_equals_drafting_step_by_step(architecture):
    raw = {
        "architectures": [architecture],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 50,
        "fc_norm": architecture.endswith("3"),
        "norm_output": architecture.endswith("3"),
    }
    torch.manual_seed(0)
    embedding = torch.randn(50, 64)
    config = parse_draft_config(raw, source="test")
    draft = build_draft(config, embed_tokens=embedding, lm_head=embedding)
    features = torch.randn(1, 9, 64 * config.num_features)
    tokens = torch.randint(0, 50, (1, 9))
    index, num_steps = 4, 4
    with torch.no_grad():
        outputs = run_chain(draft, features, tokens, num_steps)
        hidden = draft.fuse(features[0, : index + 1])
        prefix = draft.project(hidden, tokens[0, 1 : index + 2], torch.arange(index + 1))
        empty = prefix.k[None, :1, None][:, :, :0]
        attention = attend_prefix_and_chain(
            prefix.q[None, -1:], prefix.k, with_ones(prefix.v), None, empty, with_ones(empty)
        )
        node = draft.finish(attention[0], prefix.residual[-1:])
        torch.testing.assert_close(node.head_input[0], outputs[0].head_input[0, index])
        keys, values = [], []
        for step in range(1, num_steps):
            token = tokens[0, index + 1 + step][None]
            projection = draft.project(node.feedback, token, torch.tensor([index + step]))
            keys.append(projection.k)
            values.append(projection.v)
            attention = attend_prefix_and_chain(
                projection.q[None],
                prefix.k,
                with_ones(prefix.v),
                None,
                torch.stack(keys, dim=1)[None],
                with_ones(torch.stack(values, dim=1)[None]),
            )
            node = draft.finish(attention[0], projection.residual)
            torch.testing.assert_close(
                node.head_input[0], outputs[step].head_input[0, index], atol=1e-5, rtol=1e-5
            )


def test_head_loss_and_gradient_equal_autograd():
    torch.manual_seed(0)
    head = torch.randn(97, 16)
    inputs = torch.randn(3, 40, 16, requires_grad=True)
    hidden, weights = torch.randn(40, 16), torch.tensor([0.5, 0.3, 0.2])
    loss, means = soft_cross_entropy(inputs, hidden, head, weights)
    (gradient,) = torch.autograd.grad(loss * 2, inputs)
    target = (hidden @ head.T).softmax(dim=-1)
    expected_means = -(target * (inputs @ head.T).log_softmax(dim=-1)).sum(dim=-1).mean(dim=-1)
    expected = (weights * expected_means).sum()
    (expected_gradient,) = torch.autograd.grad(expected * 2, inputs)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(means, expected_means.detach())
    torch.testing.assert_close(gradient, expected_gradient)
