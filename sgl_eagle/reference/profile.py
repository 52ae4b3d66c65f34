"""Measure the cost table: medians of every kind of pass, through the very code that decodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from sgl_eagle.reference.decision_time import with_decision_times
from sgl_eagle.reference.ordered_attention import ATTENTION_BACKEND
from sgl_eagle.reference.pair import Pair
from sgl_eagle.reference.sampling_config import GREEDY
from sgl_eagle.reference.target import KvCache
from sgl_eagle.reference.tree_drafter import DraftCache, DraftRoots, TreeDrafter
from sgl_eagle.reference.verify import verify_tree
from sgl_eagle_harness.cost_table import CostGrid, CostSetup, CostTable
from sgl_eagle_harness.errors import CostTableError
from sgl_eagle_harness.types import NO_NODE, DraftTree, FloatArray, IntArray
from sgl_eagle_tuner.provenance import collect_provenance

Average = Literal["median", "mean"]


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """The grid to measure.

    Attributes:
        num_tokens: Tree sizes of a target pass, root included; must hold 1.
        widths: Nodes expanded in one draft step.
        num_pending: Tokens that draft-extend processes.
        context_len: Tokens before the root.
        topk: Children taken of every expanded node while measuring.
        num_repeats: Measurements behind each median.
        seed: Of the token ids, which cost does not depend on.
    """

    num_tokens: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
    widths: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    num_pending: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12)
    context_len: tuple[int, ...] = (1, 128, 384)
    topk: int = 8
    num_repeats: int = 9
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_tokens", "widths", "num_pending", "context_len"):
            points = getattr(self, name)
            if not points or list(points) != sorted(set(points)) or points[0] < 1:
                raise CostTableError(
                    f"{name} must be distinct, ascending and at least 1, got {points}"
                )
        for name in ("num_tokens", "widths", "num_pending"):
            if getattr(self, name)[0] != 1:
                raise CostTableError(f"{name} must begin with 1, got {getattr(self, name)}")
        if self.num_repeats < 1:
            raise CostTableError(f"num_repeats must be at least 1, got {self.num_repeats}")

    @property
    def num_cells(self) -> int:
        """Grid cells that are measured."""
        per_context = len(self.num_tokens) + len(self.widths) + len(self.num_pending)
        return per_context * len(self.context_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """One grid cell: which curve, where on it, what to set up untimed, and the pass to time."""

    kind: str
    row: int
    column: int
    prepare: Callable[[], object]
    run: Callable[[object], None]


def cost_setup(pair: Pair) -> CostSetup:
    """What a latency of this process depends on.

    Args:
        pair: Target and draft.

    Returns:
        The setup that a table is measured on and checked against.
    """
    here = collect_provenance(seed=0)
    on_gpu = pair.target.device.startswith("cuda")
    return CostSetup(
        device=(here.gpu or "GPU") if on_gpu else here.cpu,
        tensor_parallel_size=1,
        dtype=pair.dtype,
        attention_backend=ATTENTION_BACKEND,
        engine="reference",
        engine_version=_own_version(),
        num_threads=torch.get_num_threads(),
        target=pair.target_identity,
        draft=pair.draft_identity,
    )


def measure_costs(pair: Pair, config: ProfileConfig, *, on_cell: Callable[[], None]) -> CostTable:
    """Measure the whole grid at once.

    Args:
        pair: Target and draft.
        config: The grid.
        on_cell: Called after every measured cell of every round.

    Returns:
        The table, for batch size 1.
    """
    profiler = CostProfiler(pair, config)
    for _ in range(config.num_repeats):
        profiler.run_round(on_cell)
    return profiler.table()


class CostProfiler:
    """Measures the grid in rounds, which may be spread over whatever else the process does.

    A machine that is shared with others drifts: costs and the runs that they are to predict must
    come from the same minutes.
    """

    def __init__(self, pair: Pair, config: ProfileConfig) -> None:
        """Prepare the passes and run each once, since first calls allocate and choose kernels.

        Args:
            pair: Target and draft.
            config: The grid; its number of repeats is the caller's affair.

        Raises:
            CostTableError: If a context is longer than the target's.
        """
        longest = pair.target.dims.max_positions
        if config.context_len[-1] > longest:
            raise CostTableError(
                f"context_len must be at most {longest} on this target, got "
                f"{config.context_len[-1]}"
            )
        self._pair, self._config = pair, config
        self._rng = np.random.default_rng(config.seed)
        self._cells = [
            cell
            for column, context in enumerate(config.context_len)
            for cell in _cells(pair, config, column, context)
        ]
        self._rounds: list[FloatArray] = []
        for cell in self._cells:
            cell.run(cell.prepare())

    def begin(self) -> None:
        """Forget the rounds so far."""
        self._rounds = []

    def run_round(self, on_cell: Callable[[], None] = lambda: None) -> None:
        """Time every cell once, in random order, so that a slow moment does not bend one curve.

        Args:
            on_cell: Called after every cell.
        """
        times = np.zeros(len(self._cells))
        for index in self._rng.permutation(len(self._cells)):
            cell = self._cells[index]
            prepared = cell.prepare()
            started = time.perf_counter()
            cell.run(prepared)
            times[index] = (time.perf_counter() - started) * 1e6
            on_cell()
        self._rounds.append(times)

    def table(self, *, average: Average = "median") -> CostTable:
        """Average the rounds so far; times the policy's decisions too.

        Args:
            average: "median" says what a pass costs when nothing disturbs it, which is what a
                policy should decide by; "mean" adds up to the time that a run takes, disturbances
                included, which is what a prediction is compared with.

        Returns:
            The table, for batch size 1.

        Raises:
            CostTableError: If no round was run.
        """
        if not self._rounds:
            raise CostTableError("a cost table needs at least one round of measurements, got 0")
        config = self._config
        axes = {
            "target": config.num_tokens,
            "draft": config.widths,
            "draft_extend": config.num_pending,
        }
        averages = {
            kind: np.zeros((len(axis), len(config.context_len))) for kind, axis in axes.items()
        }
        function = np.median if average == "median" else np.mean
        for cell, us in zip(self._cells, function(self._rounds, axis=0), strict=True):
            averages[cell.kind][cell.row, cell.column] = us
        grids = {
            kind: CostGrid(
                kind=kind,
                batch_size=np.array([1]),
                num_tokens=np.array(axis),
                context_len=np.array(config.context_len),
                us=averages[kind][None],
            )
            for kind, axis in axes.items()
        }
        passes = CostTable(
            setup=cost_setup(self._pair),
            target=grids["target"],
            draft=grids["draft"],
            draft_extend=grids["draft_extend"],
            decide_us=0.0,
            verify_select_us=0.0,
        )
        return with_decision_times(passes)


def _cells(pair: Pair, config: ProfileConfig, column: int, context: int) -> Iterator[_Cell]:
    # Passes at one context length, each over caches that are filled up to it.
    device = pair.target.device
    rng = np.random.default_rng((config.seed, context))
    vocab_size = pair.target.dims.vocab_size

    def tokens(count: int) -> Tensor:
        return torch.from_numpy(rng.integers(0, vocab_size, count)).to(device)

    cache = pair.target.make_cache(context + config.num_tokens[-1])
    features = pair.target.forward(tokens(context)[None], cache=cache, start=0).features[0]
    for row, count in enumerate(config.num_tokens):
        tree = _star_tree(rng.integers(0, vocab_size, count))
        yield _Cell(
            kind="target",
            row=row,
            column=column,
            prepare=lambda: None,
            run=partial(_verify, pair, cache, tree, context),
        )
    draft_cache = DraftCache(pair.draft, capacity=context + config.num_pending[-1])
    root = draft_cache.extend(features, tokens(context)).take(slice(-1, None))
    for row, width in enumerate(config.widths):
        yield _Cell(
            kind="draft",
            row=row,
            column=column,
            prepare=partial(_drafter_with_children, draft_cache, root, max(width, config.topk)),
            run=partial(_expand, np.arange(width)[None], config.topk),
        )
    for row, count in enumerate(config.num_pending):
        yield _Cell(
            kind="draft_extend",
            row=row,
            column=column,
            prepare=partial(draft_cache.truncate, context),
            run=partial(
                _extend, draft_cache, features[:1].expand(count, -1), tokens(count), config.topk
            ),
        )
        draft_cache.truncate(context)


def _verify(pair: Pair, cache: KvCache, tree: DraftTree, context: int, _: object) -> None:
    verify_tree(pair.target, cache, tree, num_cached=context, sampling=GREEDY, first_index=0)


def _drafter_with_children(cache: DraftCache, root: DraftRoots, topk: int) -> TreeDrafter:
    cache.truncate(int(root.positions[0]) + 1)
    drafter = cache.drafter(root)
    drafter.expand_root(topk)
    return drafter


def _expand(handles: IntArray, topk: int, drafter: object) -> None:
    cast("TreeDrafter", drafter).expand(handles, topk)


def _extend(cache: DraftCache, features: Tensor, tokens: Tensor, topk: int, _: object) -> None:
    roots = cache.extend(features, tokens)
    cache.drafter(roots.take(slice(-1, None))).expand_root(topk)


def _star_tree(tokens: IntArray) -> DraftTree:
    # A root with children alone: the cost of a pass depends on the number of nodes.
    count = len(tokens)
    parents = np.zeros(count, np.int64)
    parents[0] = NO_NODE
    return DraftTree(
        tokens=tokens,
        parents=parents,
        depths=np.minimum(np.arange(count), 1),
        path_log_confidence=np.zeros(count, np.float32),
        columns=np.arange(-1, count - 1),
    )


def _own_version() -> str:
    try:
        return version("sgl-eagle")
    except PackageNotFoundError:
        return "source"
