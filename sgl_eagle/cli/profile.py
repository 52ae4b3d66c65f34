"""`sgl-eagle profile`: the cost table of this machine."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_eagle.cli.frame.arguments import positive_int
from sgl_eagle.cli.frame.output import render_table, write_result
from sgl_eagle.cli.frame.paths import require_writable
from sgl_eagle.cli.frame.progress import progress_counter
from sgl_eagle.cli.pair_arguments import add_pair_arguments, load_pair_from

if TYPE_CHECKING:
    from sgl_eagle_harness.cost_file import CostFile, CurveRecord

HELP = "measure what target passes, draft steps and draft-extends cost on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sgl-eagle profile`.

    Args:
        parser: The command's parser.
    """
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="cost table to write, JSON"
    )
    parser.add_argument(
        "--repeats",
        type=positive_int,
        default=9,
        metavar="N",
        help="measurements behind each median (default: 9)",
    )
    parser.add_argument(
        "--context",
        type=positive_int,
        nargs="+",
        default=[1, 128, 384],
        metavar="N",
        help="context lengths of the grid, ascending; policies can be used and replayed only "
        "between the first and the last (default: 1 128 384)",
    )
    add_pair_arguments(parser)
    parser.epilog = "example: sgl-eagle profile --out runs/cost.json --context 1 512 2048"


def run(args: argparse.Namespace) -> int:
    """Measure and write.

    Args:
        args: Parsed arguments.

    Returns:
        0.
    """
    from sgl_eagle.reference.profile import ProfileConfig, measure_costs
    from sgl_eagle_harness.cost_file import CostFile, save_cost_file
    from sgl_eagle_tuner.provenance import collect_provenance

    require_writable(args.out, "--out")
    config = ProfileConfig(context_len=tuple(args.context), num_repeats=args.repeats)
    pair = load_pair_from(args)
    with progress_counter(
        description="profile",
        total=config.num_cells * config.num_repeats,
        unit="pass",
        quiet=args.quiet,
    ) as advance:
        table = measure_costs(pair, config, on_cell=lambda: advance(1))
    record = CostFile.from_table(
        table,
        num_repeats=config.num_repeats,
        created=datetime.now(UTC),
        commit=collect_provenance(seed=config.seed).commit,
    )
    save_cost_file(args.out, record)
    write_result(record, text=_as_text(record, args.out), output_format=args.format)
    return 0


def _as_text(record: CostFile, out: Path) -> str:
    rows = [
        [title, str(count), *(f"{us / 1000:.2f}" for us in by_context)]
        for title, curve in _curves(record)
        for count, by_context in zip(curve.num_tokens, curve.us[0], strict=True)
    ]
    headers = ["pass", "tokens", *(f"ms at context {context}" for context in record.context_len)]
    return "\n".join(
        [
            render_table(headers, rows),
            "",
            f"one decision {record.decide_us / 1000:.2f} ms, choosing what to verify "
            f"{record.verify_select_us / 1000:.2f} ms",
            *(_error_line(title, curve) for title, curve in _curves(record)),
            f"wrote {out}",
        ]
    )


def _curves(record: CostFile) -> list[tuple[str, CurveRecord]]:
    return [
        ("target pass", record.target),
        ("draft step", record.draft),
        ("draft-extend", record.draft_extend),
    ]


def _error_line(title: str, curve: CurveRecord) -> str:
    error = curve.holdout_error
    if error.median_relative is None or error.max_relative is None:
        return f"{title}: error not measured"
    return (
        f"{title}: cells left out are predicted within {error.median_relative:.1%} (median), "
        f"{error.max_relative:.1%} (worst of {error.num_cells})"
    )
