"""Drawn trees: which nodes, where, and what their boxes say."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_eagle_tuner.report.tree_svg import (
    MAX_TOKEN_COLUMNS,
    draw_tree,
    layout_tree,
    select_drawn_nodes,
    visible_token,
)
from sgl_eagle_tuner.report.trees import DrawnTree, TreeNode


@st.composite
def drawn_trees(draw: st.DrawFn) -> DrawnTree:
    nodes: list[TreeNode] = []
    last_accepted = -1
    for index in range(draw(st.integers(0, 30))):
        parent = draw(st.integers(-1, index - 1))
        above = nodes[parent].path_confidence if parent >= 0 else 1.0
        is_pruned = parent >= 0 and nodes[parent].state == "pruned"
        state = "pruned" if is_pruned else draw(st.sampled_from(["pruned", "rejected", "accepted"]))
        if state == "accepted" and parent != last_accepted:
            state = "rejected"
        if state == "accepted":
            last_accepted = index
        nodes.append(
            TreeNode(
                parent=parent,
                token_text=draw(st.text(max_size=20)),
                path_confidence=above * draw(st.floats(0, 1)),
                accept_prob=draw(st.none() | st.floats(0, 1)),
                state=state,
            )
        )
    return DrawnTree(
        workload="w",
        prompt_id="p",
        policy_name="x",
        position=0,
        context_text="",
        root_text=draw(st.text(max_size=5)),
        bonus_text=draw(st.text(max_size=5)),
        num_draft_tokens=1 + sum(node.state != "pruned" for node in nodes),
        nodes=nodes,
    )


@given(tree=drawn_trees(), limit=st.integers(0, 35))
def test_selection_keeps_the_verified_and_is_closed_under_parents(
    tree: DrawnTree, limit: int
) -> None:
    drawn = select_drawn_nodes(tree.nodes, limit)
    verified = [index for index, node in enumerate(tree.nodes) if node.state != "pruned"]
    assert set(verified) <= set(drawn)
    assert len(drawn) <= max(limit, len(verified))
    assert all(tree.nodes[index].parent in {-1, *drawn} for index in drawn)
    if limit >= len(tree.nodes):
        assert drawn == list(range(len(tree.nodes)))


@given(tree=drawn_trees())
def test_boxes_do_not_overlap_and_edges_do_not_cross(tree: DrawnTree) -> None:
    boxes = layout_tree(tree, range(len(tree.nodes)))
    assert len(boxes) == len(tree.nodes) + 2
    places = [(box.column, box.row) for box in boxes]
    assert len(set(places)) == len(places)
    edges = sorted(
        (box.column, box.row, boxes[box.parent].row) for box in boxes if box.parent is not None
    )
    for (column, _, parent_row), (next_column, _, next_parent_row) in pairwise(edges):
        assert column != next_column or parent_row <= next_parent_row
    for box in boxes:
        if box.parent is not None:
            assert box.column == boxes[box.parent].column + 1
            assert box.row >= boxes[box.parent].row


@given(tree=drawn_trees())
def test_the_bonus_token_hangs_from_the_last_accepted_node(tree: DrawnTree) -> None:
    boxes = layout_tree(tree, range(len(tree.nodes)))
    (bonus,) = [box for box in boxes if box.state == "bonus"]
    assert bonus.column == tree.num_correct_drafts + 1
    assert bonus.parent is not None
    assert boxes[bonus.parent].state == ("accepted" if tree.num_correct_drafts else "root")


@given(tree=drawn_trees())
def test_any_token_text_gives_well_formed_svg(tree: DrawnTree) -> None:
    svg = ElementTree.fromstring(draw_tree(tree))
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    rects = list(svg.iter("rect"))
    assert len(rects) == len(tree.nodes) + 2
    for rect in rects:
        left, top, wide, high = (float(rect.attrib[k]) for k in ("x", "y", "width", "height"))
        assert left >= 0
        assert left + wide <= width
        assert top >= 0
        assert top + high <= height


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "·the"),
        ("\n\n", "↵↵"),
        ("\t", "⇥"),
        ("", "∅"),
        ("a\x00b", "a\N{REPLACEMENT CHARACTER}b"),
        ("internationalisation", "internatio…"),
        ("日本語の長い文字列", "日本語の長…"),
        ("<b>&", "<b>&"),
    ],
)
def test_visible_token(text: str, shown: str) -> None:
    assert visible_token(text) == shown


@given(st.text())
def test_visible_tokens_fit_their_box(text: str) -> None:
    assert 1 <= len(visible_token(text)) <= MAX_TOKEN_COLUMNS


def test_scores_stand_under_the_token() -> None:
    node = TreeNode(
        parent=-1, token_text=" a", path_confidence=0.5, accept_prob=0.25, state="accepted"
    )
    tree = DrawnTree(
        workload="w",
        prompt_id="p",
        policy_name="x",
        position=0,
        context_text="",
        root_text="r",
        bonus_text="b",
        num_draft_tokens=2,
        nodes=[node],
    )
    texts = [text.text for text in ElementTree.fromstring(draw_tree(tree)).iter("text")]
    assert texts == ["r", "root", "✓ ·a", "0.50 → 0.25", "b", "bonus"]
