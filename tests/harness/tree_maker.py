"""Drafters for tests: a fixed table of children, and random children."""

from __future__ import annotations

import numpy as np

from sgl_eagle_harness.types import NO_NODE, BatchContext, Children


def make_batch(num_rows=1, *, batch_size=1, context_len=100, num_pending=2) -> BatchContext:
    return BatchContext(
        batch_size=batch_size,
        context_len=np.full(num_rows, context_len),
        num_pending=np.full(num_rows, num_pending),
    )


class TableDrafter:
    """Children by path name: {"": [("A", 0.9), ("B", 0.08)], "A": [("C", 0.7), ...]}."""

    def __init__(self, table):
        self.table = table
        self.names = [""]
        self.num_calls = 0

    def expand_root(self, topk):
        return self._children([[""]], topk)

    def expand(self, handles, topk):
        names = [[None if h == NO_NODE else self.names[h] for h in row] for row in handles]
        return self._children(names, topk)

    def _children(self, names, topk):
        self.num_calls += 1
        shape = (len(names), len(names[0]), topk)
        tokens, handles = np.zeros(shape, np.int64), np.full(shape, NO_NODE)
        probs, valid = np.ones(shape), np.zeros(shape, bool)
        for b, row in enumerate(names):
            for w, name in enumerate(row):
                for k, (token, prob) in enumerate([] if name is None else self.table(name)[:topk]):
                    tokens[b, w, k] = ord(token)
                    probs[b, w, k] = prob
                    valid[b, w, k] = True
                    handles[b, w, k] = len(self.names)
                    self.names.append(name + token)
        log_probs = np.log(probs).astype(np.float32)
        return Children(tokens=tokens, log_probs=log_probs, handles=handles, valid=valid)


class RandomDrafter:
    """Random sorted probabilities for B rows; counts calls and records widths."""

    def __init__(self, seed, num_rows, *, certain=0.0):
        self.rng = np.random.default_rng(seed)
        self.num_rows = num_rows
        self.certain = certain
        self.widths = []

    def expand_root(self, topk):
        return self._children(np.ones((self.num_rows, 1), bool), topk)

    def expand(self, handles, topk):
        self.widths.append(handles.shape[1])
        return self._children(handles != NO_NODE, topk)

    def _children(self, real, topk):
        shares = self.rng.dirichlet(np.full(topk + 1, 0.4), real.shape)[..., :topk]
        shares = -np.sort(-shares, axis=-1)
        if self.certain:
            sure = self.rng.random(real.shape) < self.certain
            shares[sure] = 0.0
            shares[sure, 0] = 1.0
        shape = shares.shape
        return Children(
            tokens=self.rng.integers(0, 1000, shape),
            log_probs=np.log(np.maximum(shares, 1e-30)).astype(np.float32),
            handles=np.arange(np.prod(shape)).reshape(shape),
            valid=np.broadcast_to(real[..., None], shape).copy(),
        )


def path_names(trees, columns, row=0):
    # For trees whose tokens are letters.
    names = []
    for selected in columns[row][columns[row] != NO_NODE]:
        name, column = "", selected
        while column != NO_NODE:
            name = chr(trees.tokens[row, column]) + name
            column = trees.parents[row, column]
        names.append(name)
    return names


def assert_closed_under_parents(trees, columns):
    for row in range(trees.num_rows):
        kept = columns[row][columns[row] != NO_NODE]
        assert (np.diff(kept) > 0).all()
        assert trees.valid[row, kept].all()
        parents = trees.parents[row, kept]
        assert set(parents[parents != NO_NODE]) <= set(kept)
        assert (columns[row][len(kept) :] == NO_NODE).all()
