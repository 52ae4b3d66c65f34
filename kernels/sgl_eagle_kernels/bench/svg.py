"""Figures that stand in a page without a file of their own."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


def inline_svg(figure: Figure) -> str:
    """A figure as an element of a page.

    Args:
        figure: Drawn; its layout is tightened.

    Returns:
        SVG from its opening tag on, without a date.
    """
    figure.tight_layout()
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
