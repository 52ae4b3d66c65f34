"""Attention against float64, and against itself among other tokens."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch installed")

from sgl_eagle.reference.ordered_attention import (  # noqa: E402
    attend_in_order,
    slots_with_ones,
    store_values,
    with_ones,
)

HEAD_DIM = 24  # its scale is no power of two
ROUNDING = 2e-6  # of float32; bfloat16 rounds by 4e-3


def make_cache(num_keys, *, num_heads=2):
    keys = torch.randn(num_heads, num_keys, HEAD_DIM)
    return keys, with_ones(torch.randn_like(keys))


def test_stored_values_are_those_that_are_taken_as_they_come():
    slots = slots_with_ones(2, 5, head_dim=HEAD_DIM, device="cpu")
    values = torch.randn(2, 3, HEAD_DIM).bfloat16()
    store_values(slots[:, 1:4], values)
    assert torch.equal(slots[:, 1:4], with_ones(values))
    assert (slots[:, [0, 4]] == 1).all()


def hide(visible):
    return torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)


@pytest.mark.parametrize("num_keys", [1, 7, 256, 257, 700])
@pytest.mark.parametrize("num_queries", [1, 5, 600])
def test_it_is_attention(num_queries, num_keys):
    torch.manual_seed(0)
    keys, values = make_cache(num_keys)
    queries = torch.randn(2, num_queries, HEAD_DIM)
    visible = torch.rand(num_queries, num_keys) < 0.5
    visible[:, 0] = True
    bias = hide(visible)
    scores = queries.double() @ keys.double().mT * HEAD_DIM**-0.5 + bias.double()
    expected = scores.softmax(dim=-1) @ values[..., :-1].double()
    attended = attend_in_order(queries, keys, values, bias)
    torch.testing.assert_close(attended.double(), expected, atol=ROUNDING, rtol=ROUNDING)


def test_large_scores_do_not_overflow():
    keys, values = make_cache(3)
    keys[:, 1] *= 1e3
    attended = attend_in_order(keys[:, 1:2] * 1e3, keys, values, None)
    torch.testing.assert_close(attended, values[:, 1:2, :-1])


@pytest.mark.parametrize("num_cached", [60, 250, 505])
def test_a_node_of_a_tree_reads_what_it_would_read_alone(num_cached):
    torch.manual_seed(0)
    path, num_nodes = [0, 3, 4, 7], 9  # the others stand between a node and its ancestors
    keys, values = make_cache(num_cached + num_nodes)
    queries = torch.randn(2, num_nodes, HEAD_DIM).bfloat16()
    visible = torch.ones(num_nodes, num_cached + num_nodes, dtype=torch.bool)
    visible[:, num_cached:] = torch.eye(num_nodes, dtype=torch.bool)
    visible[7, [num_cached + node for node in path]] = True
    among = attend_in_order(queries.float(), keys, values, hide(visible))[:, 7]
    kept = [*range(num_cached), *(num_cached + node for node in path)]
    alone = attend_in_order(queries[:, 7:8].float(), keys[:, kept], values[:, kept], None)[:, 0]
    torch.testing.assert_close(among, alone, atol=ROUNDING, rtol=ROUNDING)
    rounded = attend_in_order(queries, keys, values, hide(visible))[:, 7]
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded, among.bfloat16(), atol=0.0, rtol=0.0)
