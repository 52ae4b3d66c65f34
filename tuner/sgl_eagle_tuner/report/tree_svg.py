"""Draft trees as SVG: laid out left to right by depth, siblings top to bottom by draft order."""

from __future__ import annotations

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
MAX_TOKEN_CHARS = 11

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
        Text with "␣" for spaces, "↵" and "⇥" for line breaks and tabs, "∅" if empty, cut with "…".
    """
    shown = text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
    shown = "".join(char if char.isprintable() else "�" for char in shown)
    if not shown:
        return "∅"
    return shown if len(shown) <= MAX_TOKEN_CHARS else f"{shown[: MAX_TOKEN_CHARS - 1]}…"


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

    A first child shares its parent's row, every other leaf opens a row below, so the draft's
    favourite path runs along the top.

    Args:
        tree: The step.
        drawn: Indices from `select_drawn_nodes`.

    Returns:
        Boxes; parents come before children.
    """
    bonus = len(tree.nodes)
    parent_of = {index: tree.nodes[index].parent for index in drawn}
    accepted = [index for index in drawn if tree.nodes[index].state == "accepted"]
    parent_of[bonus] = accepted[-1] if accepted else ROOT
    children: dict[int, list[int]] = {ROOT: []}
    for index, parent in parent_of.items():
        children[index] = []
        children[parent].append(index)

    boxes: list[Box] = []
    box_of: dict[int, int] = {}
    next_row = 0
    stack = [ROOT]
    while stack:
        index = stack.pop()
        if index == ROOT:
            box = _root_box(tree)
        else:
            parent = parent_of[index]
            next_row += 0 if children[parent][0] == index else 1
            place = (boxes[box_of[parent]].column + 1, next_row, box_of[parent])
            is_bonus = index == bonus
            box = _bonus_box(tree, place) if is_bonus else _node_box(tree.nodes[index], place)
        box_of[index] = len(boxes)
        boxes.append(box)
        stack.extend(reversed(children[index]))
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
