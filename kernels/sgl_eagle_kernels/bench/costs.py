"""What the dispatcher reads, out of what was measured."""

from __future__ import annotations

from collections.abc import Iterator

from sgl_eagle_kernels.bench.case import BenchResult, Measurement
from sgl_eagle_kernels.bench.head_cases import TOPK
from sgl_eagle_kernels.lm_head.dispatch import HeadCostFile, HeadCosts, Route, RouteTimes


def collect_head_costs(result: BenchResult, source: str) -> HeadCostFile:
    """Costs of all heads of which the full head and a two-stage route were timed.

    Args:
        result: One run.
        source: Report that holds it.

    Returns:
        One entry for each shape and rank.
    """
    where = result.environment
    return HeadCostFile(
        device=where.gpu,
        dtype="bfloat16",
        topk=TOPK,
        torch=where.torch,
        triton=where.triton,
        commit=where.commit,
        created=where.created,
        source=source,
        heads=list(_collect_heads(result.measurements)),
    )


def _collect_heads(measurements: list[Measurement]) -> Iterator[HeadCosts]:
    timed = [one for one in measurements if one.route is not None and one.median_us is not None]
    factored = [one.shape for one in timed if "R" in one.shape]
    for num_tokens, hidden, rank in dict.fromkeys((s["V"], s["H"], s["R"]) for s in factored):
        routes: dict[Route, dict[int, float]] = {}
        for one in timed:
            shape = one.shape
            same = (shape["V"], shape["H"], shape.get("R", rank)) == (num_tokens, hidden, rank)
            if same and one.route is not None and one.median_us is not None:
                routes.setdefault(one.route, {})[shape["rows"]] = one.median_us
        yield HeadCosts(
            num_tokens=num_tokens,
            hidden=hidden,
            rank=rank,
            routes={
                route: RouteTimes(rows=sorted(times), us=[times[rows] for rows in sorted(times)])
                for route, times in routes.items()
            },
        )
