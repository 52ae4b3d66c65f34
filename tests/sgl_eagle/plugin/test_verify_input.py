"""Packing of trees: what one tree's layout says, for all requests at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_eagle_harness.draft_loop import verify_tree
from sgl_eagle_harness.tree_layout import build_layout
from sgl_eagle_harness.types import NO_NODE, CandidateTrees, Children

pytestmark = pytest.mark.reference


def make_trees(seed, num_rows, num_levels, topk):
    draw = np.random.default_rng(seed)
    trees = CandidateTrees.empty(num_rows)
    frontier = np.full((num_rows, 1), NO_NODE)
    for _ in range(num_levels):
        shape = (num_rows, frontier.shape[1], topk)
        trees = trees.append(
            frontier,
            Children(
                tokens=draw.integers(1, 99, shape),
                log_probs=-draw.random(shape).astype(np.float32),
                handles=np.zeros(shape, np.int64),
                valid=np.ones(shape, np.bool_),
            ),
        )
        level = trees.last_level
        width = min(topk, level.stop - level.start)
        frontier = np.stack(
            [draw.choice(np.arange(level.start, level.stop), width, replace=False)] * num_rows
        )
    return trees


def choose_columns(seed, trees, sizes):
    """Random sets of nodes that hold every node's parent, of the given sizes."""
    draw = np.random.default_rng(seed)
    columns = np.full((trees.num_rows, max(sizes, default=0)), NO_NODE)
    for row, size in enumerate(sizes):
        kept: list[int] = []
        for _ in range(size):
            open_nodes = [
                node
                for node in range(trees.num_nodes)
                if node not in kept and trees.parents[row, node] in (*kept, NO_NODE)
            ]
            kept.append(int(draw.choice(open_nodes)))
        columns[row, :size] = sorted(kept)
    return columns


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(0, 10), min_size=1, max_size=4),
    num_levels=st.integers(2, 4),
    topk=st.integers(2, 3),
    num_spare=st.integers(0, 3),
)
def test_every_request_is_laid_out_as_if_alone(seed, sizes, num_levels, topk, num_spare):
    from sgl_eagle.plugin.verify_input import largest_tree, pack_trees

    trees = make_trees(seed, len(sizes), num_levels, topk)
    sizes = [min(size, trees.num_nodes) for size in sizes]
    columns = choose_columns(seed, trees, sizes)
    assert largest_tree(columns) == 1 + max(sizes)
    packed = pack_trees(trees, columns, 1 + max(sizes) + num_spare)
    assert packed.num_draft_tokens.tolist() == [1 + size for size in sizes]
    assert packed.tokens.shape == (len(sizes), 1 + max(sizes) + num_spare)
    deepest = 0
    for row, size in enumerate(sizes):
        tree = verify_tree(trees, row, columns[row], root_token=0)
        layout = build_layout(tree.parents, root_position=0)
        nodes = slice(0, size + 1)
        assert packed.tokens[row, nodes].tolist() == tree.tokens.tolist()
        assert packed.depths[row, nodes].tolist() == layout.depths.tolist()
        assert packed.first_child[row, nodes].tolist() == layout.first_child.tolist()
        assert packed.next_sibling[row, nodes].tolist() == layout.next_sibling.tolist()
        assert packed.ancestors[row, nodes, nodes].tolist() == layout.ancestors.tolist()
        # Padding is seen by nobody and reached by no link.
        padding = slice(size + 1, None)
        assert not packed.ancestors[row, nodes, padding].any()
        assert (packed.first_child[row, padding] == NO_NODE).all()
        assert (packed.next_sibling[row, padding] == NO_NODE).all()
        assert (packed.depths[row, padding] == 1).all()
        deepest = max(deepest, int(layout.depths.max()))
    assert packed.num_steps == deepest


def send(packed, *, context_len=None, shows_prefix=False, buffer=None):
    from sgl_eagle.plugin.host_transfer import HostTransfer
    from sgl_eagle.plugin.verify_input import MaskLayout, send_trees

    num_rows = len(packed.tokens)
    return send_trees(
        packed,
        HostTransfer("cpu", 1),
        root_tokens=100 + np.arange(num_rows),
        context_len=np.arange(num_rows) if context_len is None else np.array(context_len),
        layout=MaskLayout(shows_prefix=shows_prefix, buffer=buffer),
    )


def test_without_trees_the_roots_are_left():
    from sgl_eagle.plugin.verify_input import pack_trees

    packed = pack_trees(CandidateTrees.empty(3), np.empty((3, 0), np.int64))
    assert packed.num_steps == 0
    sent = send(packed, context_len=[2, 0, 1])
    assert sent.numbers[0].tolist() == [[100], [101], [102]]
    assert sent.numbers[1].tolist() == [[2], [0], [1]]
    assert sent.mask.tolist() == [True] * 3
    assert send(packed, context_len=[2, 0, 1], shows_prefix=True).mask.tolist() == [True] * 6


def test_without_trees_padding_is_never_accepted():
    from sgl_eagle.plugin.verify_input import pack_trees

    packed = pack_trees(CandidateTrees.empty(2), np.empty((2, 0), np.int64), 3)
    assert (packed.first_child == NO_NODE).all()
    assert (packed.next_sibling == NO_NODE).all()
    assert packed.depths.tolist() == [[0, 1, 1]] * 2


def test_arrays_arrive_as_they_were_packed():
    from sgl_eagle.plugin.verify_input import pack_trees

    trees = make_trees(1, 3, 3, 2)
    packed = pack_trees(trees, choose_columns(1, trees, [4, 0, 2]))
    sent = send(packed, context_len=[7, 9, 8])
    tokens, positions, index, first_child, next_sibling = sent.numbers.numpy()
    assert tokens[:, 0].tolist() == [100, 101, 102]
    assert tokens[:, 1:].tolist() == packed.tokens[:, 1:].tolist()
    assert (positions - packed.depths).tolist() == [[7] * 5, [9] * 5, [8] * 5]
    assert index.ravel().tolist() == list(range(15))
    assert first_child.tolist() == packed.first_child.tolist()
    assert next_sibling.tolist() == packed.next_sibling.tolist()


def test_the_wide_mask_shows_all_of_the_prefix():
    from sgl_eagle.plugin.verify_input import pack_trees

    trees = make_trees(0, 2, 2, 2)
    packed = pack_trees(trees, np.array([[0, 1], [0, NO_NODE]]))
    tree_alone = send(packed).mask.view(2, 3, 3)
    assert tree_alone[0].tolist() == [
        [True, False, False],
        [True, True, False],
        [True, False, True],
    ]
    wide = send(packed, context_len=[2, 4], shows_prefix=True).mask
    first, second = wide[:15].view(3, 5), wide[15:].view(3, 7)
    assert first[:, :2].all()
    assert second[:, :4].all()
    assert first[:, 2:].equal(tree_alone[0])
    assert second[:, 4:].equal(tree_alone[1])


@pytest.mark.parametrize("shows_prefix", [False, True], ids=["narrow", "wide"])
def test_a_mask_buffer_is_overwritten_whatever_it_held(shows_prefix):
    import torch

    from sgl_eagle.plugin.verify_input import pack_trees

    trees = make_trees(0, 2, 2, 2)
    packed = pack_trees(trees, np.array([[0, 1], [0, NO_NODE]]))
    wanted = send(packed, context_len=[2, 4], shows_prefix=shows_prefix).mask
    for held in (0, 1):
        buffer = torch.full((64,), held, dtype=torch.uint8)
        mask = send(packed, context_len=[2, 4], shows_prefix=shows_prefix, buffer=buffer).mask
        assert mask.data_ptr() == buffer.data_ptr()
        assert mask.bool().equal(wanted)
        assert (buffer[len(mask) :] == held).all()
