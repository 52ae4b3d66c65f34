"""`sgl-eagle head evaluate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_eagle.cli.frame.arguments import UsageError
from sgl_eagle.cli.frame.output import render_table, write_result
from sgl_eagle.cli.frame.paths import require_writable
from sgl_eagle.cli.frame.progress import progress_counter
from sgl_eagle.cli.head_inputs import (
    chosen_prompts,
    collect_states,
    count_tokens,
    draft_folder,
    parse_shortlist,
)
from sgl_eagle.cli.pair_arguments import load_pair_from

if TYPE_CHECKING:
    from sgl_eagle.reference.head_checkpoint import FactorsInfo
    from sgl_eagle.reference.head_factors import HeadFactors
    from sgl_eagle.reference.head_routes import Route
    from sgl_eagle.reference.pair import Pair

QUANTISED_CANDIDATES = 256


def evaluate(args: argparse.Namespace) -> int:
    """Compare heads with the full one.

    Args:
        args: The parsed arguments.

    Returns:
        0.

    Raises:
        UsageError: If an option is out of range.
    """
    from sgl_eagle.reference.head_checkpoint import FACTORS_FILE, load_factors
    from sgl_eagle.reference.head_evaluate import evaluate_routes
    from sgl_eagle.reference.head_report import (
        HeadQuality,
        score_cells,
        score_headers,
        write_head_report,
    )
    from sgl_eagle_harness.types import MAX_TOPK
    from sgl_eagle_tuner.provenance import collect_provenance

    if args.report is not None:
        if args.report.suffix != ".html":
            raise UsageError(f"--report must name a file ending in .html, got {args.report}")
        require_writable(args.report, "--report")
    if args.topk > MAX_TOPK:
        raise UsageError(f"--topk must be in [1, {MAX_TOPK}], got {args.topk}")
    ranks = _ranks(args.ranks)
    for text in args.shortlists.split(","):
        parse_shortlist("--shortlists", text)
    pair = load_pair_from(args)
    paths: list[Path] = args.factors or [draft_folder(args) / FACTORS_FILE]
    loaded = [load_factors(path, pair.draft.lm_head) for path in paths]
    routes = _routes(args, pair, loaded, ranks)
    prompts = chosen_prompts(args, "held_out")
    states = collect_states(args, pair, prompts)
    with progress_counter(
        description="heads", total=1 + len(routes), unit="head", quiet=args.quiet
    ) as advance:
        scores = evaluate_routes(
            pair.draft, states, routes, topk=args.topk, on_score=lambda: advance(1)
        )
    here = collect_provenance(seed=0)
    on_gpu = pair.target.device.startswith("cuda")
    quality = HeadQuality(
        provenance=here,
        target=pair.target_identity.name,
        draft=pair.draft_identity.name,
        draft_sha256=pair.draft_identity.sha256,
        device=(here.gpu or "GPU") if on_gpu else here.cpu,
        dtype=pair.dtype,
        num_prompts=len(prompts),
        max_new_tokens=args.max_new_tokens,
        num_steps=args.num_steps,
        num_rows=states.next_tokens.numel(),
        topk=args.topk,
        factors=[info for _, info in loaded],
        scores=scores,
    )
    written = [] if args.report is None else write_head_report(args.report, quality)
    table = render_table(score_headers(args.topk), [score_cells(score) for score in scores])
    write_result(
        quality,
        text="\n".join(
            [
                table,
                f"{quality.num_rows} rows of held-out text",
                *(f"wrote {path}" for path in written),
            ]
        ),
        output_format=args.format,
    )
    return 0


def _routes(
    args: argparse.Namespace,
    pair: Pair,
    loaded: list[tuple[HeadFactors, FactorsInfo]],
    ranks: list[int] | None,
) -> list[Route]:
    from sgl_eagle.reference.head_routes import other_routes, shortlist_routes

    weight = pair.draft.lm_head
    most = max(info.rank for _, info in loaded)
    if ranks is not None and not all(1 <= rank <= most for rank in ranks):
        raise UsageError(
            f"--ranks must be in [1, {most}], the rank of the factors, got {args.ranks!r}"
        )
    shortlists = [
        parse_shortlist("--shortlists", text).build() for text in args.shortlists.split(",")
    ]
    routes = []
    for factors, info in loaded:
        # Directions of trained factors have no order: they are of one rank.
        fitting = [rank for rank in ranks or () if rank <= info.rank and info.method != "trained"]
        routes += shortlist_routes(
            weight, factors, fitting or [info.rank], shortlists, method=info.method
        )
    if args.routes == "all":
        factors, info = loaded[0]
        states = None
        if not (args.text or args.traces):
            states = collect_states(args, pair, chosen_prompts(args, "tune"))
        counts, _ = count_tokens(args, pair, states)
        rank = min(ranks) if ranks else info.rank
        routes += other_routes(
            weight, factors, counts, rank=rank, num_candidates=QUANTISED_CANDIDATES
        )
    return routes


def _ranks(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--ranks must be numbers with commas, like 64,128, got {text!r}"
        ) from None
