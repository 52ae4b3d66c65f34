"""What is timed: one operator at one shape, with the bytes that it cannot avoid to move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

CACHE_FACTOR = 4  # inputs of one replay exceed the last cache this many times


@cache
def last_cache_bytes() -> int:
    """Size of the GPU's last cache.

    Returns:
        Bytes.
    """
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One set of inputs on the device.

    Attributes:
        run: Runs the operator; may be captured in a graph.
        check: Compares it with its reference; returns what differs, an empty string if nothing.
    """

    run: Callable[[], Any]
    check: Callable[[], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operator at one shape.

    Attributes:
        op: "lm_head", "tree_grow" or "tree_select".
        variant: Route, e.g. "local 256 x 1, rank 256".
        shape: Sizes by name.
        floor_bytes: Bytes read at least: each weight and input once.
        prepare: Makes inputs from a seed.
        num_launches: Kernels of one call; None where libraries decide.
    """

    op: str
    variant: str
    shape: dict[str, int]
    floor_bytes: int
    prepare: Callable[[int], Prepared]
    num_launches: int | None = None

    @property
    def label(self) -> str:
        """The case in one line."""
        sizes = " ".join(f"{name}={size}" for name, size in self.shape.items())
        return f"{self.op} {self.variant} {sizes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Times of one case.

    Attributes:
        op: As in `Case`.
        variant: As in `Case`.
        shape: As in `Case`.
        floor_bytes: As in `Case`.
        num_launches: As in `Case`.
        median_us: Of one call inside a graph; None if it was not timed.
        p10_us: Tenth percentile.
        p90_us: Ninetieth percentile.
        num_samples: Graph replays.
        num_copies: Sets of inputs that one replay goes through.
        parity: "equal", or what differs; then nothing was timed.
    """

    op: str
    variant: str
    shape: dict[str, int]
    floor_bytes: int
    parity: str
    num_launches: int | None = None
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    num_samples: int = 0
    num_copies: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where the times were measured.

    Attributes:
        gpu: Name of the device.
        l2_bytes: Size of its last cache.
        torch: Version.
        triton: Version.
        cuda: Version that torch was built for.
        commit: Of the checkout, "unknown" outside one.
        created: UTC, ISO 8601.
        ceiling_bytes_per_us: Bytes that a kernel which only reads or copies moves in a microsecond,
            measured in the same run: the memory ceiling.
        launch_us: One kernel that does nothing, in a chain of such kernels in a graph: what a
            launch costs beside the work.
    """

    gpu: str
    l2_bytes: int
    torch: str
    triton: str
    cuda: str
    commit: str
    created: str
    ceiling_bytes_per_us: float
    launch_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """One run.

    Attributes:
        environment: Where.
        measurements: What, in the order in which cases were registered.
        schema_version: Version of this layout.
    """

    environment: Environment
    measurements: list[Measurement] = field(default_factory=list)
    schema_version: int = 3
