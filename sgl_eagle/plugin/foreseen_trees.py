"""Trees whose every level was drafted without asking the policy, put together at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sgl_eagle.plugin.finished_step import Drafted, TreeSizes
from sgl_eagle.plugin.round_mail import RoundMail
from sgl_eagle_harness.shared_rows import same_count, same_truth
from sgl_eagle_harness.tree_build import select_rerank
from sgl_eagle_harness.types import (
    NO_NODE,
    BoolArray,
    CandidateTrees,
    Float32Array,
    IntArray,
    TreeLimits,
    largest_tree_size,
)

_INFINITE = 0x7F800000
"""Exponent bits of the float32 numbers that are not finite."""
_NEGATIVE = -0x80000000
"""Sign bit of an int32."""
_FEW_ROWS = 16
"""Rows of a round up to which many are looked at at once. Beyond, their joined mail leaves the
caches: of 32 rounds of 128 rows it is 3 MB."""


class _Sizes(NamedTuple):
    # [B] each.
    num_drafted: IntArray
    num_draft_tokens: IntArray
    depths: IntArray


@dataclass(frozen=True, kw_only=True)
class ForeseenTrees:
    """EAGLE-2 trees as the device told of them; implements `finished_step.Drafted`.

    How large they are can be told without putting them together, as long as none lacks a node.

    Attributes:
        layout: Of the mail.
        mail: [B, width] int32, after all draft steps; all B requests drafted.
        limits: Levels, children and nodes expanded in a step, and nodes verified.
    """

    layout: RoundMail
    mail: npt.NDArray[np.int32]
    limits: TreeLimits

    @cached_property
    def trees(self) -> CandidateTrees:
        """Drafted nodes of B requests."""
        num_steps, topk = self.limits.num_steps - 1, self.limits.topk
        return assemble_trees(
            self.layout, self.mail, num_steps, topk=topk, speculating=self.speculating
        )

    @cached_property
    def columns(self) -> IntArray:
        """[B, C] int64 nodes verified, `NO_NODE` where padded."""
        trees = self.trees
        return select_rerank(
            trees.path_log_confidence, trees.valid, self.limits.num_draft_tokens - 1
        )

    @property
    def speculating(self) -> BoolArray:
        """[B] bool: everyone."""
        return same_truth(True, len(self.mail))

    @property
    def num_drafted(self) -> IntArray:
        """[B] int64, nodes drafted, root excluded."""
        return self._sizes.num_drafted

    @property
    def num_draft_tokens(self) -> IntArray:
        """[B] int64, nodes verified, root included, padding excluded."""
        return self._sizes.num_draft_tokens

    @property
    def depths(self) -> IntArray:
        """[B] int64, levels drafted; 0 where the draft had nothing."""
        return self._sizes.depths

    def row(self, index: int) -> ForeseenTrees:
        """What was drafted for one request.

        Args:
            index: Its row.

        Returns:
            One row, which keeps nothing of the others alive.
        """
        mail = self.mail[index : index + 1].copy()
        return ForeseenTrees(layout=self.layout, mail=mail, limits=self.limits)

    @cached_property
    def _sizes(self) -> _Sizes:
        if self.common_sizes is not None:
            return _Sizes(*(same_count(size, len(self.mail)) for size in self.common_sizes))
        valid = self.trees.valid
        drafted = np.asarray(valid.sum(axis=1))
        depths = np.asarray((valid * self.trees.depths).max(axis=1, initial=0))
        return _Sizes(drafted, 1 + np.minimum(drafted, self.limits.num_draft_tokens - 1), depths)

    @cached_property
    def common_sizes(self) -> TreeSizes | None:
        """Sizes of all trees; None if one lacks a node of a level, or stopped early."""
        return _common_sizes(self)


def note_common_sizes(rounds: Iterable[Drafted | None]) -> None:
    """Find out the common sizes of rounds, in one look at all of a kind that follow each other.

    Each would find its own when asked, in a look that takes nearly as long. They are told nothing
    where one of them has a tree that lacks a node, which is rare.

    Args:
        rounds: Of any kind; others than `ForeseenTrees`, and those of many rows, are left as they
            are.
    """
    unknown = [
        each
        for each in rounds
        if isinstance(each, ForeseenTrees)
        and len(each.mail) <= _FEW_ROWS
        and "common_sizes" not in vars(each)
    ]
    for _, group in groupby(unknown, lambda each: (each.layout, each.limits)):
        alike = list(group)
        sizes = _common_sizes(join_trees(alike))
        if sizes is not None:
            for each in alike:
                vars(each)["common_sizes"] = sizes


def _common_sizes(trees: ForeseenTrees) -> TreeSizes | None:
    bits, lacking, sizes = _complete(trees.layout, trees.limits)
    return None if ((trees.mail & bits) == lacking).any() else sizes


def join_trees(rows: Sequence[ForeseenTrees]) -> ForeseenTrees:
    """One batch of several rounds.

    Args:
        rows: At least one; of one layout and the same limits.

    Returns:
        All their rows, in order.
    """
    mail = np.concatenate([each.mail for each in rows])
    return ForeseenTrees(layout=rows[0].layout, mail=mail, limits=rows[0].limits)


def assemble_trees(
    layout: RoundMail,
    mail: npt.NDArray[np.int32],
    num_steps: int,
    *,
    topk: int,
    speculating: BoolArray,
) -> CandidateTrees:
    """What `grow_trees` returns for a policy that takes the device's frontiers as they are.

    Args:
        layout: Of the mail.
        mail: [B, width], after all draft steps.
        num_steps: Draft steps after that of the roots.
        topk: Children of a node that the policy takes, and nodes that it expands in a step.
        speculating: [B] bool, which requests draft.

    Returns:
        Trees of a level for the roots and for each step, up to the first that no request has.
    """
    branches, num_rows = layout.branches, len(mail)
    frontiers = layout.frontiers(mail).reshape(num_rows, -1, branches)[:, :num_steps, :topk]
    expanded = (frontiers >= 0) & speculating[:, None, None]
    # A level that nobody has ends the trees: no later one has parents.
    num_steps = int(np.logical_and.accumulate(expanded.any(axis=(0, 2))).sum())
    frontiers, expanded = frontiers[:, :num_steps], expanded[:, :num_steps]
    levels = [layout.level(mail, index)[:, :, :topk, :topk] for index in range(num_steps + 1)]
    levels[0] = levels[0][:, :, :1]
    joined = np.concatenate([level.reshape(num_rows, 2, -1) for level in levels], axis=2)
    log_probs: Float32Array = np.ascontiguousarray(joined[:, 1]).view(np.float32)
    num_nodes = log_probs.shape[1]
    starts = [0, *range(topk, num_nodes, topk**2)]
    inside = frontiers // branches * topk + frontiers % branches
    columns = np.where(expanded, inside + np.array(starts[:-1])[:, None], NO_NODE)
    finite: BoolArray = np.isfinite(log_probs)
    groups: BoolArray = np.asarray(finite.reshape(num_rows, -1, topk).all(axis=2))
    groups[:, 0] &= speculating  # a group is the children of one node
    groups[:, 1:] &= expanded.reshape(num_rows, -1)
    parents = np.full(log_probs.shape, NO_NODE)
    parents[:, topk:] = columns.reshape(num_rows, -1).repeat(topk, axis=1)
    paths = log_probs.copy()
    rows = np.arange(num_rows)[:, None]
    for step, start in enumerate(starts[1:]):
        paths[:, start : start + topk**2] += paths[rows, columns[:, step]].repeat(topk, axis=1)
    valid = groups.repeat(topk, axis=1)
    depths, ranks, handles = _shape(branches, topk, num_nodes)
    lowest = np.float32(-np.inf)
    return CandidateTrees(
        tokens=joined[:, 0].astype(np.int64),
        parents=parents,
        depths=depths,
        ranks=ranks,
        step_log_probs=np.where(valid, log_probs, lowest),
        path_log_confidence=np.where(valid, paths, lowest),
        handles=np.broadcast_to(handles, (num_rows, num_nodes)),
        valid=valid,
        level_starts=starts,
    )


@lru_cache
def _complete(
    layout: RoundMail, limits: TreeLimits
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], TreeSizes]:
    # [1, width] bits of a row of mail that tell whether a tree lacks something, what they are then,
    # and the sizes of trees that lack nothing. Numbers that tell nothing are never as they say.
    num_steps, topk = limits.num_steps, limits.topk
    bits = np.zeros((1, layout.width), np.int32)
    frontiers = layout.frontiers(bits).reshape(1, -1, layout.branches)
    frontiers[:, : num_steps - 1, :topk] = _NEGATIVE
    levels = layout.log_prob_bits(bits, num_steps)
    levels[:, :1, :1, :topk] = levels[:, 1:, :topk, :topk] = _INFINITE
    num_drafted = largest_tree_size(num_steps=num_steps, topk=topk) - 1
    num_draft_tokens = 1 + min(num_drafted, limits.num_draft_tokens - 1)
    return bits, np.where(bits == 0, 1, bits), TreeSizes(num_drafted, num_draft_tokens, num_steps)


@lru_cache
def _shape(branches: int, topk: int, num_nodes: int) -> tuple[IntArray, IntArray, IntArray]:
    # Depth, rank and handle of every column; a handle is a column of the whole level.
    columns = np.arange(num_nodes)
    later = columns >= topk
    in_level = np.where(later, (columns - topk) % topk**2, columns)
    depths = np.where(later, 2 + (columns - topk) // topk**2, 1)
    return depths, columns % topk, in_level // topk * branches + in_level % topk
