"""Matplotlib figures as inline SVG: page colours and fonts, own ids, no styles that leak."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PANEL_WIDTH_IN = 4.4
"""At 72 points an inch this fills a phone's width and fits twice or three times on a desktop."""

PALETTE = {
    "bg": ("#0a0a00", "#ffffff"),
    "ink": ("#0a0a01", "#1c2128"),
    "muted": ("#0a0a02", "#5c6470"),
    "line": ("#0a0a03", "#d9dde3"),
    "plain": ("#0a0b01", "#8b93a0"),
    "usual": ("#0a0b02", "#c98a00"),
    "best_static": ("#0a0b03", "#4aa3d8"),
    "tuned": ("#0a0b04", "#0b5cad"),
    "variant": ("#0a0b05", "#b4bbc5"),
    "draft_extend": ("#0a0c01", "#7cc4ee"),
    "draft": ("#0a0c02", "#0b72b5"),
    "decide": ("#0a0c03", "#d55e00"),
    "verify": ("#0a0c04", "#9aa2ad"),
    "other": ("#0a0c05", "#d4d8de"),
    "context_0": ("#0a0d01", "#8cc6ef"),
    "context_1": ("#0a0d02", "#4aa3d8"),
    "context_2": ("#0a0d03", "#0b72b5"),
    "context_3": ("#0a0d04", "#063f74"),
}
"""Name of a page colour -> (colour drawn by matplotlib and replaced afterwards, fallback colour).

The drawn colours only need to be distinct; the page's style sheet gives each name its light and
its dark value, so that one SVG serves both.
"""

_STYLE: dict[Any, Any] = {  # Matplotlib types its keys differently from version to version
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9.0,
    "axes.edgecolor": PALETTE["line"][0],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": PALETTE["muted"][0],
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    "grid.color": PALETTE["line"][0],
    "grid.linewidth": 0.6,
    "savefig.facecolor": "none",
    "text.color": PALETTE["ink"][0],
    "xtick.color": PALETTE["line"][0],
    "xtick.labelcolor": PALETTE["muted"][0],
    "ytick.color": PALETTE["line"][0],
    "ytick.labelcolor": PALETTE["ink"][0],
}


def color(name: str) -> str:
    """The colour to hand to matplotlib for a page colour.

    Args:
        name: Key of `PALETTE`.

    Returns:
        The stand-in that `inline_svg` replaces.
    """
    return PALETTE[name][0]


@contextmanager
def figure(width_in: float, height_in: float) -> Iterator[Figure]:
    """A figure in the page's style; draw inside the block.

    Args:
        width_in: Width in inches, 72 page points each.
        height_in: Height in inches.

    Yields:
        An empty figure without any global state behind it.
    """
    with mpl.rc_context(_STYLE):
        yield Figure(figsize=(width_in, height_in))


def label_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Name the rows of a horizontal bar chart, first row on top.

    Args:
        axes: Bars drawn at 0, 1, ...
        labels: One per bar.
    """
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def inline_svg(drawing: Figure, figure_id: str, label: str) -> str:
    """Turn a figure into an SVG element for an HTML page.

    Args:
        drawing: A finished figure.
        figure_id: Unique in the page; prefixes every id inside.
        label: What the figure shows, for those who cannot see it.

    Returns:
        One `<svg>` element: no XML header, no style element, themed colours.
    """
    buffer = io.StringIO()
    with mpl.rc_context(_STYLE | {"svg.hashsalt": figure_id}):
        drawing.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{figure_id}-', text)
    text = re.sub(r"url\(#", f"url(#{figure_id}-", text)
    text = re.sub(r'href="#', f'href="#{figure_id}-', text)
    for name, (drawn, fallback) in PALETTE.items():
        text = text.replace(drawn, f"var(--{name.replace('_', '-')}, {fallback})")
    opening = f'<svg class="plot" role="img" aria-label="{escape(label)}"'
    return text.replace("<svg", opening, 1).strip()
