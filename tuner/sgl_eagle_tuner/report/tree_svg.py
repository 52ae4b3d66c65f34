"""Draft trees as SVG, left to right by depth, siblings from top to bottom by their rank."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from sgl_eagle_tuner.report.format import format_number
from sgl_eagle_tuner.report.trees import DrawnTree, TreeNode

MAX_DRAWN_NODES = 36
"""Nodes drawn at most, unless more were verified; a taller drawing cannot be read at a glance."""

COLUMN_PX = 128
ROW_PX = 40
BOX_WIDTH_PX = 96
BOX_HEIGHT_PX = 32
MARGIN_PX = 6
MAX_TOKEN_COLUMNS = 11

ROOT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One placed token.

    Attributes:
        column: Depth in the tree; the root is in column 0.
        row: Row, 0 on top.
        parent: Index of the parent's box, None for the root.
        state: "root", "bonus", "pruned", "rejected" or "accepted".
        text: Token text, spaces made visible, cut where too long.
        scores: Second line of the box, empty if there is none.
        spoken: Full text for the tooltip.
    """

    column: int
    row: int
    parent: int | None
    state: str
    text: str
    scores: str
    spoken: str


def visible_token(text: str) -> str:
    """A token's text such that spaces and line breaks can be seen.

    Args:
        text: The token, decoded alone.

    Returns:
        Text with "·" for spaces, "↵" and "⇥" for line breaks and tabs, "∅" if empty, cut with "…".
    """
    shown = text.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥")
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in shown)
    if not shown:
        return "∅"
    if _columns(shown) <= MAX_TOKEN_COLUMNS:
        return shown
    while _columns(shown) > MAX_TOKEN_COLUMNS - 1:
        shown = shown[:-1]
    return f"{shown}…"


def _columns(text: str) -> int:
    # As in a terminal: wide East Asian characters take two columns.
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def select_drawn_nodes(nodes: Sequence[TreeNode], limit: int = MAX_DRAWN_NODES) -> list[int]:
    """Nodes worth drawing: all verified ones, and the most confident pruned ones.

    Args:
        nodes: Drafted nodes, parents first.
        limit: Nodes drawn at most, unless more were verified.

    Returns:
        Ascending indices, closed under parents.
    """
    verified = {index for index, node in enumerate(nodes) if node.state != "pruned"}
    pruned = [index for index, node in enumerate(nodes) if node.state == "pruned"]
    pruned.sort(key=lambda index: -nodes[index].path_confidence)
    kept = verified | set(pruned[: max(0, limit - len(verified))])
    closed: set[int] = set()
    for index in sorted(kept):
        if nodes[index].parent == ROOT or nodes[index].parent in closed:
            closed.add(index)
    return sorted(closed)


def layout_tree(tree: DrawnTree, drawn: Sequence[int]) -> list[Box]:
    """Place the root, the drawn nodes and the bonus token.

    A column holds one depth, its nodes in the order of their parents, each no higher than its
    parent: edges never cross, and the draft's favourite path runs along the top.

    Args:
        tree: The step.
        drawn: Indices from `select_drawn_nodes`.

    Returns:
        Boxes by depth; parents come before children.
    """
    bonus = len(tree.nodes)
    parent_of = {index: tree.nodes[index].parent for index in drawn}
    accepted = [index for index in drawn if tree.nodes[index].state == "accepted"]
    parent_of[bonus] = accepted[-1] if accepted else ROOT
    children: dict[int, list[int]] = {ROOT: []}
    for index, parent in parent_of.items():
        children[index] = []
        children[parent].append(index)

    boxes = [_root_box(tree)]
    level = [(ROOT, 0)]
    while level:
        next_level = []
        free_row = 0
        for index, box_index in level:
            for child in children[index]:
                row = max(free_row, boxes[box_index].row)
                free_row = row + 1
                place = (boxes[box_index].column + 1, row, box_index)
                is_bonus = child == bonus
                box = _bonus_box(tree, place) if is_bonus else _node_box(tree.nodes[child], place)
                next_level.append((child, len(boxes)))
                boxes.append(box)
        level = next_level
    return boxes


def _root_box(tree: DrawnTree) -> Box:
    return Box(
        column=0,
        row=0,
        parent=None,
        state="root",
        text=visible_token(tree.root_text),
        scores="root",
        spoken=f"root {tree.root_text!r}, the last committed token",
    )


def _node_box(node: TreeNode, place: tuple[int, int, int]) -> Box:
    column, row, parent = place
    confidence = format_number(node.path_confidence, 2)
    scores, spoken = confidence, f"path confidence {node.path_confidence:.3f}"
    if node.accept_prob is not None:
        scores = f"{confidence} → {format_number(node.accept_prob, 2)}"
        spoken += f", calibrated {node.accept_prob:.3f}"
    return Box(
        column=column,
        row=row,
        parent=parent,
        state=node.state,
        text=visible_token(node.token_text),
        scores=scores,
        spoken=f"{node.state} {node.token_text!r}, {spoken}",
    )


def _bonus_box(tree: DrawnTree, place: tuple[int, int, int]) -> Box:
    column, row, parent = place
    return Box(
        column=column,
        row=row,
        parent=parent,
        state="bonus",
        text=visible_token(tree.bonus_text),
        scores="bonus",
        spoken=f"bonus token {tree.bonus_text!r}, from the target",
    )


def draw_tree(tree: DrawnTree) -> str:
    """One step's tree as an SVG element, styled by the page.

    Args:
        tree: The step.

    Returns:
        `<svg>` without ids, colours or scripts; classes name the state of each node.
    """
    boxes = layout_tree(tree, select_drawn_nodes(tree.nodes))
    width = max(box.column for box in boxes) * COLUMN_PX + BOX_WIDTH_PX + 2 * MARGIN_PX
    height = max(box.row for box in boxes) * ROW_PX + BOX_HEIGHT_PX + 2 * MARGIN_PX
    svg = ElementTree.Element(
        "svg",
        {
            "class": "tree",
            "role": "img",
            "width": str(width),
            "height": str(height),
            "viewBox": f"0 0 {width} {height}",
            "aria-label": (
                f"Draft tree: {len(tree.nodes)} nodes drafted, {tree.num_draft_tokens} verified "
                f"with the root, {tree.num_correct_drafts} accepted"
            ),
        },
    )
    for box in boxes:
        if box.parent is not None:
            _add_edge(svg, boxes[box.parent], box)
    for box in boxes:
        _add_box(svg, box)
    return ElementTree.tostring(svg, encoding="unicode", short_empty_elements=False)


def _corner(box: Box) -> tuple[int, int]:
    return MARGIN_PX + box.column * COLUMN_PX, MARGIN_PX + box.row * ROW_PX


def _add_edge(svg: ElementTree.Element, parent: Box, child: Box) -> None:
    left, top = _corner(parent)
    x_from, y_from = left + BOX_WIDTH_PX, top + BOX_HEIGHT_PX // 2
    x_to, y_child = _corner(child)
    y_to = y_child + BOX_HEIGHT_PX // 2
    x_mid = (x_from + x_to) // 2
    path = f"M{x_from} {y_from}C{x_mid} {y_from} {x_mid} {y_to} {x_to} {y_to}"
    ElementTree.SubElement(svg, "path", {"class": f"edge {child.state}", "d": path})


def _add_box(svg: ElementTree.Element, box: Box) -> None:
    left, top = _corner(box)
    group = ElementTree.SubElement(svg, "g", {"class": f"node {box.state}"})
    ElementTree.SubElement(group, "title").text = box.spoken
    ElementTree.SubElement(
        group,
        "rect",
        {
            "x": str(left),
            "y": str(top),
            "width": str(BOX_WIDTH_PX),
            "height": str(BOX_HEIGHT_PX),
            "rx": "6",
        },
    )
    centre = str(left + BOX_WIDTH_PX // 2)
    token = ElementTree.SubElement(group, "text", {"x": centre, "y": str(top + 14), "class": "tok"})
    token.text = f"✓ {box.text}" if box.state == "accepted" else box.text
    scores = ElementTree.SubElement(
        group, "text", {"x": centre, "y": str(top + 26), "class": "score"}
    )
    scores.text = box.scores
