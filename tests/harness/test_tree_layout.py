from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sgl_eagle_harness.tree_layout import build_layout
from sgl_eagle_harness.types import NO_NODE


@st.composite
def parent_lists(draw):
    num_nodes = draw(st.integers(1, 20))
    return np.array([NO_NODE, *(draw(st.integers(0, i - 1)) for i in range(1, num_nodes))])


@given(parents=parent_lists(), root=st.integers(0, 1000))
def test_layout_equals_walks(parents, root):
    layout = build_layout(parents, root)
    for node in range(len(parents)):
        path = []
        walker = node
        while walker != NO_NODE:
            path.append(walker)
            walker = parents[walker]
        assert set(np.flatnonzero(layout.ancestors[node])) == set(path)
        assert layout.depths[node] == len(path) - 1
        assert layout.positions[node] == root + len(path) - 1
        children = []
        walker = layout.first_child[node]
        while walker != NO_NODE:
            children.append(walker)
            walker = layout.next_sibling[walker]
        assert children == np.flatnonzero(parents == node).tolist()


def test_worked_tree():
    layout = build_layout(np.array([-1, 0, 1, 1, 2, 3]), 7)
    assert layout.positions.tolist() == [7, 8, 9, 9, 10, 10]
    assert layout.first_child.tolist() == [1, 2, 4, 5, -1, -1]
    assert layout.next_sibling.tolist() == [-1, -1, 3, -1, -1, -1]
    assert layout.ancestors.astype(int).tolist()[4] == [1, 1, 1, 0, 1, 0]
