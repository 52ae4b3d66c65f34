"""Times inside CUDA graphs, over inputs that do not fit the cache together."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch
import triton

from sgl_eagle_kernels.bench.case import (
    CACHE_FACTOR,
    Case,
    Environment,
    Measurement,
    Prepared,
    last_cache_bytes,
)

MOST_COPIES = 256
WARM_UPS = 3
CALLS_PER_GRAPH = 32  # at least: the launch of the graph itself must not show
EMPTY_KERNELS = 256
CEILING_BYTES = 1 << 30


def measure_case(case: Case, *, num_samples: int) -> Measurement:
    """Check a case against its reference, then time it.

    Args:
        case: What to time.
        num_samples: Graph replays, at least 2; 0 only checks.

    Returns:
        Times, or what differs from the reference.
    """
    first = case.prepare(0)
    untimed = Measurement(
        op=case.op,
        variant=case.variant,
        shape=case.shape,
        floor_bytes=case.floor_bytes,
        parity=first.check() or "equal",
        num_launches=case.num_launches,
    )
    if untimed.parity != "equal" or not num_samples:
        return untimed
    spread = CACHE_FACTOR * last_cache_bytes() // max(1, case.floor_bytes)
    num_copies = min(MOST_COPIES, 1 + spread)
    sets = [first, *(case.prepare(seed) for seed in range(1, num_copies))]
    samples = time_calls(sets, num_samples=num_samples)
    deciles = statistics.quantiles(samples, n=10)
    return replace(
        untimed,
        median_us=statistics.median(samples),
        p10_us=deciles[0],
        p90_us=deciles[-1],
        num_samples=num_samples,
        num_copies=num_copies,
    )


def time_calls(sets: list[Prepared], *, num_samples: int) -> list[float]:
    """Time one graph that goes through all sets of inputs.

    Args:
        sets: Inputs.
        num_samples: Replays, at least 2.

    Returns:
        Microseconds of one call, for each replay.
    """
    rounds = -(-CALLS_PER_GRAPH // len(sets))

    def run_all() -> None:
        for _ in range(rounds):
            for prepared in sets:
                prepared.run()

    return [us / (rounds * len(sets)) for us in _time_graph(run_all, num_samples)]


def _time_graph(run: Callable[[], None], num_samples: int) -> list[float]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):  # compiles, and lets libraries allocate before the capture
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    for _ in range(WARM_UPS):
        graph.replay()
    events = [_event_pair() for _ in range(num_samples)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def _event_pair() -> tuple[Any, Any]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def measure_ceiling(*, num_samples: int) -> float:
    """The memory ceiling.

    Args:
        num_samples: Graph replays.

    Returns:
        Bytes in a microsecond, read or written, of the faster of two kernels: one reads a gibibyte,
        the other copies one.
    """
    # Imported late, as all kernels are: at import Triton decides to compile or to interpret.
    from sgl_eagle_kernels.bench._triton import BLOCK, copy_all, read_all

    source = torch.randint(2**31 - 1, (CEILING_BYTES // 4,), dtype=torch.int32, device="cuda")
    largest = torch.empty(len(source) // BLOCK, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    read_us = statistics.median(_time_graph(lambda: read_all(source, largest), num_samples))
    copy_us = statistics.median(_time_graph(lambda: copy_all(source, target), num_samples))
    return max(CEILING_BYTES / read_us, 2 * CEILING_BYTES / copy_us)


def measure_launch(*, num_samples: int) -> float:
    """What a launch costs beside the work.

    Args:
        num_samples: Graph replays.

    Returns:
        Microseconds of one kernel that does nothing, in a chain of them.
    """
    from sgl_eagle_kernels.bench._triton import launch_nothing

    def run() -> None:
        for _ in range(EMPTY_KERNELS):
            launch_nothing()

    return statistics.median(_time_graph(run, num_samples)) / EMPTY_KERNELS


def describe_environment(*, num_samples: int) -> Environment:
    """Where the times are measured.

    Args:
        num_samples: Graph replays of the memory ceiling and of launches.

    Returns:
        Device, versions, commit, ceiling and launch cost.
    """
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    git = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return Environment(
        gpu=device.name,
        l2_bytes=device.L2_cache_size,
        torch=torch.__version__,
        triton=triton.__version__,
        cuda=str(torch.version.cuda),
        commit=git.stdout.strip() or "unknown",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        ceiling_bytes_per_us=measure_ceiling(num_samples=num_samples),
        launch_us=measure_launch(num_samples=num_samples),
    )
