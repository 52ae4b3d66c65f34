"""`sgl-eagle record`: dense traces of a draft on real prompts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_eagle.cli.frame.arguments import UsageError, naming_flags, positive_int
from sgl_eagle.cli.frame.output import write_result
from sgl_eagle.cli.frame.paths import require_writable_folder
from sgl_eagle.cli.frame.progress import progress_counter
from sgl_eagle.cli.pair_arguments import add_pair_arguments, load_pair_from
from sgl_eagle.cli.prompt_arguments import prompt_source, prompts_from
from sgl_eagle.cli.sampling_arguments import add_sampling_arguments, sampling_from

if TYPE_CHECKING:
    from sgl_eagle.reference.prompts import Prompt

SERVERS_OWN = (
    *("out", "num_steps", "beams", "seed"),
    *("target", "draft", "lm_head", "dtype", "device", "threads"),
)
"""Arguments that a running server has settled already."""

HELP = "record dense traces: the largest tree at every position of the target's own text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sgl-eagle record`.

    Args:
        parser: The command's parser.
    """
    from sgl_eagle.reference.record_config import RecordConfig

    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="prompt files, JSON Lines with id, workload and turns (default: those shipped)",
    )
    parser.add_argument(
        "--split",
        choices=("tune", "held_out"),
        help="only prompts of this split (default: all)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for shards")
    parser.add_argument(
        "--engine",
        metavar="URL",
        help="a running SGLang server that records (--sgl-eagle-record) what it is asked; then the "
        "server says what it drafts, how it runs and where its traces go (default: none, decode "
        "here)",
    )
    parser.add_argument(
        "--num-steps",
        type=positive_int,
        default=RecordConfig.num_steps,
        metavar="N",
        help="draft steps at every position: no deeper policy can be replayed "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--beams",
        default=",".join(map(str, RecordConfig.beams)),
        metavar="K,K,...",
        help="values of topk that the tuner may try; the widest is stored (default: %(default)s)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive_int,
        default=RecordConfig.max_new_tokens,
        metavar="N",
        help="completion length at most (default: %(default)s)",
    )
    parser.add_argument(
        "--limit",
        type=positive_int,
        metavar="N",
        help="only the first N prompts of each workload (default: all)",
    )
    parser.add_argument(
        "--rows",
        type=positive_int,
        default=RecordConfig.rows,
        metavar="N",
        help="prompts at a time (default: %(default)s)",
    )
    add_pair_arguments(parser)
    add_sampling_arguments(parser)
    parser.set_defaults(defaults_here={name: parser.get_default(name) for name in SERVERS_OWN})
    parser.epilog = (
        "example: sgl-eagle record --split tune --out runs/traces\n"
        "example: sgl-eagle record --engine http://127.0.0.1:30000 --prompts my-prompts.jsonl\n"
        "Ctrl-C keeps the prompts that are finished."
    )


def run(args: argparse.Namespace) -> int:
    """Record.

    Args:
        args: Parsed arguments.

    Returns:
        0.

    Raises:
        UsageError: If there is neither a folder nor a server to record in.
    """
    if args.engine is not None:
        return _record_in_server(args)
    if args.out is None:
        raise UsageError("--out must name a folder for shards")
    from sgl_eagle.reference.record_config import RecordConfig
    from sgl_eagle.reference.recorder import record_prompts
    from sgl_eagle_tuner.provenance import collect_provenance

    require_writable_folder(args.out, "--out")
    with naming_flags(num_steps="--num-steps", beams="--beams"):
        config = RecordConfig(
            num_steps=args.num_steps,
            beams=_beams(args.beams),
            max_new_tokens=args.max_new_tokens,
            rows=args.rows,
            sampling=sampling_from(args),
        )
    prompts = _prompts(args)
    pair = load_pair_from(args)
    budget = 2 * args.max_new_tokens * len(prompts)
    with (
        naming_flags(max_new_tokens="--max-new-tokens"),
        progress_counter(
            description="record", total=budget, unit="tok", quiet=args.quiet
        ) as advance,
    ):
        summary = record_prompts(
            pair,
            prompts,
            args.out,
            config,
            source=prompt_source(args.prompts),
            on_tokens=advance,
            commit=collect_provenance(seed=args.seed).commit,
        )
    write_result(
        summary,
        text=f"recorded {summary.num_positions} positions of {summary.num_prompts} prompts in "
        f"{len(summary.shards)} shards under {args.out}",
        output_format=args.format,
    )
    return 0


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    from sgl_eagle.reference.prompts import select_prompts

    return select_prompts(prompts_from(args), split=args.split, per_workload=args.limit)


def _record_in_server(args: argparse.Namespace) -> int:
    from sgl_eagle.plugin.drive_server import DriveConfig, drive_server

    for name in SERVERS_OWN:
        if getattr(args, name) != args.defaults_here[name]:
            raise UsageError(
                f"--{name.replace('_', '-')} must be left out with --engine, whose server was "
                f"started with its own, got {getattr(args, name)}"
            )
    prompts = _prompts(args)
    config = DriveConfig(
        url=args.engine.rstrip("/"),
        concurrency=args.rows,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
    )
    with progress_counter(
        description="record", total=len(prompts), unit="prompt", quiet=args.quiet
    ) as advance:
        summary = drive_server(prompts, config, on_prompt=lambda: advance(1))
    write_result(
        summary,
        text=f"{summary.model} answered {summary.num_prompts} prompts with {summary.num_tokens} "
        f"tokens in {summary.seconds:.1f} s; its traces are where --sgl-eagle-record says",
        output_format=args.format,
    )
    return 0


def _beams(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--beams must be numbers with commas, like 1,2,4,8, got {text!r}"
        ) from None
