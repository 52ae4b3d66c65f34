"""Drafting trees with a real model, from one position of a text or from many at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sgl_eagle.reference.chain_attention import attend_prefix_and_chain
from sgl_eagle.reference.draft_models import Draft
from sgl_eagle.reference.ordered_attention import slots_with_ones, store_values, with_ones
from sgl_eagle_harness.types import NO_NODE, BoolArray, Children, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRoots:
    """Where trees start: the draft's own output at the entry of each root.

    Attributes:
        feedback: [P, H] what the children of each root are fed.
        head_input: [P, H] what predicts the children of each root.
        positions: [P] int64 rotary position of each root's entry.
    """

    feedback: Tensor
    head_input: Tensor
    positions: Tensor

    def take(self, rows: slice) -> DraftRoots:
        """Some of the roots.

        Args:
            rows: Which of the P.

        Returns:
            Those, in the same order.
        """
        return DraftRoots(
            feedback=self.feedback[rows],
            head_input=self.head_input[rows],
            positions=self.positions[rows],
        )


class DraftCache:
    """Keys and values of a draft for one text: one entry for every committed token but the last.

    Entry i joins the target's features of token i with token i + 1. Trees never enter the cache:
    their nodes carry their own keys, so nothing has to be rolled back.

    Attributes:
        num_entries: Entries so far.
    """

    def __init__(self, draft: Draft, *, capacity: int) -> None:
        """Allocate.

        Args:
            draft: Draft model.
            capacity: Entries at most.
        """
        config, weight = draft.config, draft.embed_tokens
        slots = (capacity, config.num_key_value_heads)
        self._draft = draft
        self._keys = torch.zeros((*slots, config.head_dim), device=weight.device)
        self._values = slots_with_ones(*slots, head_dim=config.head_dim, device=weight.device)
        self.num_entries = 0

    @torch.inference_mode()
    def extend(self, features: Tensor, tokens: Tensor) -> DraftRoots:
        """Add committed tokens (draft-extend).

        Args:
            features: [m, F] target features of tokens i, i + 1, ...
            tokens: [m] int64, the token that follows each.

        Returns:
            A root for each of the m entries.
        """
        start, end = self.num_entries, self.num_entries + len(tokens)
        positions = torch.arange(start, end, device=tokens.device)
        projection = self._draft.project(self._draft.fuse(features), tokens, positions)
        self._keys[start:end] = projection.k
        store_values(self._values[start:end], projection.v)
        self.num_entries = end
        attention = attend_prefix_and_chain(
            projection.q[:, None],
            self._keys[:end],
            self._values[:end],
            self._visible_from(positions),
            *_no_chains(self._keys, self._values, (len(tokens), 1)),
        )
        output = self._draft.finish(attention[:, 0], projection.residual)
        return DraftRoots(
            feedback=output.feedback, head_input=output.head_input, positions=positions
        )

    def truncate(self, num_entries: int) -> None:
        """Forget the latest entries.

        Args:
            num_entries: How many to keep, at most as many as there are.
        """
        self.num_entries = min(num_entries, self.num_entries)

    def drafter(self, roots: DraftRoots) -> TreeDrafter:
        """Draft trees from some roots.

        Args:
            roots: P of them, each over the entries up to its own.

        Returns:
            A drafter of P rows.
        """
        last_only = len(roots.positions) == 1 and int(roots.positions[0]) == self.num_entries - 1
        return TreeDrafter(
            self._draft,
            roots,
            prefix_keys=self._keys[: self.num_entries],
            prefix_values=self._values[: self.num_entries],
            prefix_visible=None if last_only else self._visible_from(roots.positions),
        )

    def _visible_from(self, positions: Tensor) -> Tensor:
        # [P, num_entries]: a position sees the entries up to its own.
        entries = torch.arange(self.num_entries, device=positions.device)
        return entries <= positions[:, None]


class TreeDrafter:
    """Implements `sgl_eagle_harness.draft_loop.Drafter` for P roots of one text.

    Handles name children of the latest level: a policy expands that level or none.
    """

    def __init__(
        self,
        draft: Draft,
        roots: DraftRoots,
        *,
        prefix_keys: Tensor,
        prefix_values: Tensor,
        prefix_visible: Tensor | None,
    ) -> None:
        """Start at the roots; see `DraftCache.drafter`.

        Args:
            draft: Draft model.
            roots: P roots.
            prefix_keys: [L, Hkv, D] float32, committed entries.
            prefix_values: [L, Hkv, D + 1] float32, `with_ones`.
            prefix_visible: [P, L] bool, None if every root sees all.
        """
        self._draft = draft
        self._roots = roots
        self._prefix = (prefix_keys, prefix_values, prefix_visible)
        # The latest level: its nodes' tokens [P, W * K], and of its W expanded parents the
        # feedback [P, W, H] and the chain of keys and values down to them [P, W, depth, Hkv, ...].
        num_rows = len(roots.positions)
        self._tokens = roots.positions.new_empty((num_rows, 0))
        self._feedback = roots.feedback[:, None]
        self._chain_keys, self._chain_values = _no_chains(prefix_keys, prefix_values, (num_rows, 1))

    @torch.inference_mode()
    def expand_root(self, topk: int) -> Children:
        """Children of the roots.

        Args:
            topk: Children of each.

        Returns:
            [P, 1, topk].
        """
        valid = np.ones((len(self._roots.positions), 1), np.bool_)
        return self._children(self._roots.head_input[:, None], valid, topk)

    @torch.inference_mode()
    def expand(self, handles: IntArray, topk: int) -> Children:
        """Children of nodes of the latest level.

        Args:
            handles: [P, W] int64, handles of the nodes; `NO_NODE` is padding.
            topk: Children of each.

        Returns:
            [P, W, topk].
        """
        valid = handles != NO_NODE
        nodes = torch.from_numpy(np.where(valid, handles, 0)).to(self._tokens.device)
        rows = torch.arange(len(nodes), device=nodes.device)[:, None]
        parents = nodes // (self._tokens.shape[1] // self._feedback.shape[1])
        depth = self._chain_keys.shape[2] + 1
        projection = self._draft.project(
            self._feedback[rows, parents],
            self._tokens[rows, nodes],
            (self._roots.positions[:, None] + depth).expand(nodes.shape),
        )
        self._chain_keys = torch.cat(
            [self._chain_keys[rows, parents], projection.k.float()[:, :, None]], dim=2
        )
        self._chain_values = torch.cat(
            [self._chain_values[rows, parents], with_ones(projection.v)[:, :, None]], dim=2
        )
        attention = attend_prefix_and_chain(
            projection.q, *self._prefix, self._chain_keys, self._chain_values
        )
        output = self._draft.finish(attention, projection.residual)
        self._feedback = output.feedback
        return self._children(output.head_input, valid, topk)

    def _children(self, head_input: Tensor, valid: BoolArray, topk: int) -> Children:
        # Scores the expanded nodes: the one device-to-host copy of a draft step.
        num_rows, width = valid.shape
        # Padding is left out of the head, which is most of a draft step.
        kept = torch.from_numpy(valid).to(head_input.device)
        log_probs, ids = self._draft.best_children(head_input[kept], topk)
        self._tokens = ids.new_zeros((num_rows, width, topk))
        self._tokens[kept] = ids
        self._tokens = self._tokens.view(num_rows, width * topk)
        children = Children(
            tokens=self._tokens.cpu().numpy().reshape(num_rows, width, topk),
            log_probs=np.full((num_rows, width, topk), -np.inf, np.float32),
            handles=np.broadcast_to(
                np.arange(width * topk).reshape(width, topk), (num_rows, width, topk)
            ),
            valid=np.broadcast_to(valid[:, :, None], (num_rows, width, topk)),
        )
        children.log_probs[valid] = log_probs.cpu().numpy()
        return children


def _no_chains(keys: Tensor, values: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    # [*shape, 0, Hkv, ...]: nodes without drafted ancestors.
    return keys.new_empty((*shape, 0, *keys.shape[1:])), values.new_empty(
        (*shape, 0, *values.shape[1:])
    )
