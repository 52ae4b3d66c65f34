"""`sgl-eagle profile`: the cost table of this machine."""

from __future__ import annotations

import argparse
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_eagle.cli.frame.arguments import UsageError, naming_flags, positive_int
from sgl_eagle.cli.frame.output import render_table, write_result
from sgl_eagle.cli.frame.paths import require_writable
from sgl_eagle.cli.frame.progress import progress_counter
from sgl_eagle.cli.pair_arguments import add_pair_arguments, load_pair_from
from sgl_eagle.cli.serve import server_command

if TYPE_CHECKING:
    from sgl_eagle_harness.cost_file import CostFile, CurveRecord

SERVERS_OWN = ("repeats", "context", "lm_head", "draft_weights", "dtype", "device", "threads")
"""Arguments that an SGLang server settles by flags of its own."""

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
    parser.add_argument(
        "--engine",
        choices=("reference", "sglang"),
        default="reference",
        help="what runs: sglang starts a server, whose start-up table is the result; give it "
        "--target and --draft, and everything else after two dashes (default: reference)",
    )
    parser.add_argument(
        "server_flags", metavar="-- FLAG", nargs="*", help="with --engine sglang, for SGLang"
    )
    add_pair_arguments(parser)
    names = (*SERVERS_OWN, "target")
    parser.set_defaults(defaults_here={name: parser.get_default(name) for name in names})
    parser.epilog = (
        "example: sgl-eagle profile --out runs/cost.json --context 1 512 2048\n"
        "example: sgl-eagle profile --engine sglang --target models/llama --draft models/eagle3 "
        "--out runs/cost.json -- --max-running-requests 64 --context-length 8192"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and write.

    Args:
        args: Parsed arguments.

    Returns:
        0.
    """
    from sgl_eagle_harness.cost_file import save_cost_file

    require_writable(args.out, "--out")
    record = _profile_server(args) if args.engine == "sglang" else _profile_here(args)
    save_cost_file(args.out, record)
    write_result(record, text=_as_text(record, args.out), output_format=args.format)
    return 0


def _profile_here(args: argparse.Namespace) -> CostFile:
    from sgl_eagle.reference.profile import ProfileConfig, measure_costs
    from sgl_eagle_harness.cost_file import CostFile
    from sgl_eagle_tuner.provenance import collect_provenance

    if args.server_flags:
        raise UsageError(
            f"flags after two dashes are for --engine sglang, got {shlex.join(args.server_flags)}"
        )
    named = {"context_len": "--context"}
    with naming_flags(**named):
        config = ProfileConfig(context_len=tuple(args.context), num_repeats=args.repeats)
    pair = load_pair_from(args)
    with (
        naming_flags(**named),
        progress_counter(
            description="profile",
            total=config.num_cells * config.num_repeats,
            unit="pass",
            quiet=args.quiet,
        ) as advance,
    ):
        table = measure_costs(pair, config, on_cell=lambda: advance(1))
    return CostFile.from_table(
        table,
        num_repeats=config.num_repeats,
        created=datetime.now(UTC),
        commit=collect_provenance(seed=config.seed).commit,
    )


def _profile_server(args: argparse.Namespace) -> CostFile:
    from sgl_eagle.plugin.profile_command import profile_server

    for name in SERVERS_OWN:
        if getattr(args, name) != args.defaults_here[name]:
            raise UsageError(
                f"--{name.replace('_', '-')} must be left out with --engine sglang, got "
                f"{getattr(args, name)}: SGLang's own flags go after two dashes"
            )
    if args.draft is None or args.target == args.defaults_here["target"]:
        raise UsageError("--engine sglang needs --target and --draft, folders that SGLang serves")
    command = server_command(args.target, str(args.draft), None, args.server_flags)
    with progress_counter(
        description="profile in SGLang", total=1, unit="table", quiet=args.quiet
    ) as advance:
        record = profile_server(command)
        advance(1)
    return record


def _as_text(record: CostFile, out: Path) -> str:
    rows = [
        [title, str(batch), str(count), *(f"{us / 1000:.2f}" for us in by_context)]
        for title, curve in _curves(record)
        for batch, by_tokens in zip(record.batch_size, curve.us, strict=True)
        for count, by_context in zip(curve.num_tokens, by_tokens, strict=True)
    ]
    headers = [
        "pass",
        "batch",
        "tokens",
        *(f"ms at context {context}" for context in record.context_len),
    ]
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
