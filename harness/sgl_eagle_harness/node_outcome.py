"""Which drafted nodes the target would have accepted, read off the text that followed.

A node is accepted if and only if its path spells the text, whether it was verified or not. So a
running engine learns the outcome of nodes that it pruned, too, once the text has caught up, and
what it learns from is not censored by its own choices.
"""

from __future__ import annotations

import numpy as np

from sgl_eagle_harness.types import BoolArray, CandidateTrees, IntArray


def spell_path(tokens: IntArray, parents: IntArray, depths: IntArray, text: IntArray) -> BoolArray:
    """Mark the nodes of one tree whose whole path spells the text.

    Args:
        tokens: [N] int64; parents come before children, siblings hold different tokens.
        parents: [N] int64, `NO_NODE` for the root's children.
        depths: [N] int64, at least 1.
        text: [L] int64, the tokens after the root.

    Returns:
        [N] bool; False also for nodes deeper than L, whose outcome is not known.
    """
    on_path = np.zeros(len(tokens), np.bool_)
    deepest = min(len(text), int(depths.max(initial=0)))
    above = np.zeros(len(tokens), np.bool_)
    for depth in range(1, deepest + 1):
        level = (depths == depth) & (tokens == text[depth - 1])
        if depth > 1:
            level &= above[parents]
        on_path |= level
        if not level.any():
            break
        above = level
    return on_path


def spell_paths(trees: CandidateTrees, texts: IntArray, lengths: IntArray) -> BoolArray:
    """Mark the nodes of many trees whose whole path spells the text of their row.

    Args:
        trees: N nodes in each of B rows.
        texts: [B, L] int64, the tokens after each root; padded at the end.
        lengths: [B] int64, how many tokens of each text count.

    Returns:
        [B, N] bool; False also for nodes deeper than a text, whose outcome is not known.
    """
    on_path = np.zeros(trees.valid.shape, np.bool_)
    starts = trees.level_starts
    for index, (start, end) in enumerate(zip(starts, [*starts[1:], trees.num_nodes], strict=True)):
        if index == texts.shape[1]:
            break
        level = slice(start, end)
        spells = trees.valid[:, level] & (trees.tokens[:, level] == texts[:, index : index + 1])
        spells &= (lengths > index)[:, None]
        if index:
            spells &= np.take_along_axis(on_path, trees.parents[:, level], axis=1)
        on_path[:, level] = spells
    return on_path
