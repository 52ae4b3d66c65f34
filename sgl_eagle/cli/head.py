"""`sgl-eagle head`: low-rank factors of a draft's LM head, and what they lose."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_eagle.cli.frame.arguments import UsageError, positive_int
from sgl_eagle.cli.frame.output import render_table, write_result
from sgl_eagle.cli.frame.paths import require_writable
from sgl_eagle.cli.frame.progress import progress_counter
from sgl_eagle.cli.pair_arguments import add_pair_arguments, load_pair_from
from sgl_eagle.cli.prompt_arguments import prompts_from

if TYPE_CHECKING:
    from torch import Tensor

    from sgl_eagle.reference.head_checkpoint import GlobalShortlist, LocalShortlist
    from sgl_eagle.reference.head_evaluate import HeadScore
    from sgl_eagle.reference.head_states import HeadStates
    from sgl_eagle.reference.pair import Pair

HELP = "make low-rank factors of a draft's LM head, or measure what they lose"

EPILOG = """examples:
  sgl-eagle head factorize --draft runs/head --rank 128 --activate local:64:1
  sgl-eagle head evaluate --draft runs/head --ranks 64,96,128 --shortlists local:128:1,global:256
`factorize` writes two_stage_head/factors.safetensors into the draft's folder; --activate makes the
draft use it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sgl-eagle head`.

    Args:
        parser: The command's parser.
    """
    parser.add_argument("action", choices=("factorize", "evaluate"), help="what to do")
    make = parser.add_argument_group("factorize")
    make.add_argument("--rank", type=positive_int, default=128, help="default: %(default)s")
    make.add_argument(
        "--method",
        choices=("freq-svd", "svd", "states-svd"),
        default="states-svd",
        help="weigh tokens by frequency, nothing, or tokens by frequency and directions by the "
        "head's inputs on the tune prompts (default: %(default)s)",
    )
    make.add_argument(
        "--traces",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="dense traces whose tokens are counted too",
    )
    make.add_argument(
        "--text", type=Path, metavar="DIR", help="text of `train` whose tokens are counted too"
    )
    make.add_argument(
        "--smoothing",
        type=float,
        default=1.0,
        help="count that every token starts with (default: %(default)s)",
    )
    make.add_argument(
        "--activate",
        metavar="LIST",
        help="shortlist that the draft is to use: local:TILE:PER_TILE or global:CANDIDATES",
    )
    judge = parser.add_argument_group("evaluate")
    judge.add_argument(
        "--ranks", metavar="R,R,...", help="ranks to try (default: that of the factors)"
    )
    judge.add_argument(
        "--shortlists",
        default="global:256,global:512,local:64:1,local:128:1,natural:128:1",
        metavar="LIST,...",
        help="also natural:TILE:PER_TILE, without shuffling (default: %(default)s)",
    )
    judge.add_argument("--topk", type=positive_int, default=8, help="default: %(default)s")
    text = parser.add_argument_group("text the target writes (factorize: tune, evaluate: held out)")
    text.add_argument("--prompts", type=Path, nargs="+", metavar="FILE", help="prompt files")
    text.add_argument("--limit", type=positive_int, default=4, help="prompts of each workload")
    text.add_argument("--max-new-tokens", type=positive_int, default=128, metavar="N")
    text.add_argument("--num-steps", type=positive_int, default=5, metavar="N", help="draft steps")
    add_pair_arguments(parser, head_option=False)
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Make factors or judge them.

    Args:
        args: The parsed arguments.

    Returns:
        0.
    """
    return _factorize(args) if args.action == "factorize" else _evaluate(args)


def _factorize(args: argparse.Namespace) -> int:
    from sgl_eagle.reference.head_checkpoint import (
        FACTORS_FILE,
        FactorsInfo,
        activate_head,
        save_factors,
    )
    from sgl_eagle.reference.head_factors import (
        factorize_head,
        relative_error,
        row_norms,
        smooth_frequencies,
    )

    if args.smoothing <= 0:
        raise UsageError(f"--smoothing must be above 0, got {args.smoothing}")
    shortlist = _shortlist("--activate", args.activate) if args.activate else None
    path = _draft_folder(args) / FACTORS_FILE
    require_writable(path, "--draft")
    pair = load_pair_from(args)
    weight = pair.draft.lm_head
    if not args.rank <= weight.shape[1]:
        raise UsageError(f"--rank must be in [1, {weight.shape[1]}], got {args.rank}")
    frequencies = second_moment = counts = None
    sources: list[str] = []
    if args.method != "svd":
        states = None
        if args.method == "states-svd" or not (args.traces or args.text):
            states = _states(args, pair, "tune")
        counts, sources = _count_tokens(args, pair, states)
        frequencies = smooth_frequencies(counts, args.smoothing).to(weight.device)
        if states is not None and args.method == "states-svd":
            inputs = states.inputs.flatten(0, 1).double()
            second_moment = inputs.T @ inputs / len(inputs)
    factors = factorize_head(
        weight, args.rank, frequencies=frequencies, second_moment=second_moment
    )
    info = FactorsInfo(
        method=args.method,
        rank=args.rank,
        vocab_size=weight.shape[0],
        relative_error=relative_error(weight, factors.apply(weight)),
        row_norms=row_norms(weight),
        num_tokens=0 if counts is None else int(counts.sum()),
        smoothing=0 if counts is None else args.smoothing,
        text=", ".join(sources) or "none",
    )
    save_factors(path, factors, info)
    if shortlist is not None:
        activate_head(_draft_folder(args), shortlist)
    write_result(
        {"factors": path, "info": info, "activated": shortlist},
        text=f"wrote {path}: rank {info.rank} by {info.method}, relative error "
        f"{info.relative_error:.3f}" + (f"\nactivated {args.activate}" if args.activate else ""),
        output_format=args.format,
    )
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    from sgl_eagle.reference.head_checkpoint import FACTORS_FILE, load_factors
    from sgl_eagle.reference.head_evaluate import evaluate_heads

    path = _draft_folder(args) / FACTORS_FILE
    shortlists = [_shortlist("--shortlists", text).build() for text in args.shortlists.split(",")]
    pair = load_pair_from(args)
    factors, info = load_factors(path, pair.draft.lm_head)
    ranks = _ranks(args.ranks, info.rank)
    states = _states(args, pair, "held_out")
    total = 1 + len(ranks) * (1 + len(shortlists))
    with progress_counter(
        description="heads", total=total, unit="head", quiet=args.quiet
    ) as advance:
        scores = evaluate_heads(
            pair.draft,
            states,
            factors,
            ranks=ranks,
            shortlists=shortlists,
            topk=args.topk,
            on_score=lambda: advance(1),
        )
    num_rows = states.next_tokens.numel()
    write_result(
        {"factors": info, "num_rows": num_rows, "topk": args.topk, "scores": scores},
        text=f"{_table(scores, args.topk)}\n{num_rows} rows of held-out text",
        output_format=args.format,
    )
    return 0


def _draft_folder(args: argparse.Namespace) -> Path:
    from sgl_eagle.reference.pair import SHIPPED_DRAFT

    folder: Path = args.draft or SHIPPED_DRAFT
    return folder


def _states(args: argparse.Namespace, pair: Pair, split: str) -> HeadStates:
    from sgl_eagle.reference.head_states import collect_head_states
    from sgl_eagle.reference.prompts import select_prompts

    prompts = select_prompts(
        prompts_from(args), split="tune" if split == "tune" else "held_out", per_workload=args.limit
    )
    total = len(prompts) * args.max_new_tokens
    with progress_counter(
        description="target writes", total=total, unit="tok", quiet=args.quiet
    ) as advance:
        return collect_head_states(
            pair,
            prompts,
            max_new_tokens=args.max_new_tokens,
            num_steps=args.num_steps,
            on_tokens=advance,
        )


def _count_tokens(
    args: argparse.Namespace, pair: Pair, states: HeadStates | None
) -> tuple[Tensor, list[str]]:
    import torch

    from sgl_eagle.reference.train_data import load_text
    from sgl_eagle_harness.trace_store import list_shards, read_dense_trace

    parts, sources = [], []
    if states is not None:
        first = states.next_tokens[0]
        parts.append(first[first >= 0].cpu())
        sources.append("answers to the tune prompts")
    if args.traces:
        shards = [shard for path in args.traces for shard in list_shards(path)]
        parts.append(torch.from_numpy(read_dense_trace(shards).next_token).long())
        sources.append("dense traces")
    if args.text:
        rows = load_text(args.text)
        inside = torch.arange(rows.tokens.shape[1])[None] < rows.answer_end[:, None]
        parts.append(rows.tokens[inside].long())
        sources.append("text of training")
    by_target_id = torch.bincount(torch.cat(parts), minlength=pair.target.dims.vocab_size)
    ids = torch.arange(pair.draft.lm_head.shape[0], device=pair.draft.lm_head.device)
    return by_target_id[pair.draft.to_target_ids(ids).cpu()], sources


def _shortlist(flag: str, text: str) -> GlobalShortlist | LocalShortlist:
    from sgl_eagle.reference.head_checkpoint import GlobalShortlist, LocalShortlist

    try:
        match text.split(":"):
            case ["global", count]:
                chosen: GlobalShortlist | LocalShortlist = GlobalShortlist(
                    num_candidates=int(count)
                )
            case [("local" | "natural") as kind, tile_size, per_tile]:
                chosen = LocalShortlist(
                    tile_size=int(tile_size),
                    per_tile=int(per_tile),
                    shuffle_seed=0 if kind == "local" else None,
                )
            case _:
                raise ValueError("expected local:TILE:PER_TILE or global:CANDIDATES")
        chosen.build()
    except ValueError as error:
        raise UsageError(f"{flag}: {text!r}: {error}") from error
    return chosen


def _ranks(text: str | None, most: int) -> list[int]:
    if text is None:
        return [most]
    try:
        ranks = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--ranks must be numbers with commas, like 64,128, got {text!r}"
        ) from None
    if not all(1 <= rank <= most for rank in ranks):
        raise UsageError(f"--ranks must be in [1, {most}], the rank of the factors, got {text!r}")
    return ranks


def _table(scores: list[HeadScore], topk: int) -> str:
    headers = ["rank", "candidates", "number", "recall@1", f"recall@{topk}", "expected"]
    headers += ["same top-1", "log-prob error", "prob error", "accept length"]
    rows = [
        [
            "full" if score.rank is None else str(score.rank),
            score.shortlist,
            str(score.num_candidates),
            f"{score.recall_top1:.4f}",
            f"{score.recall_topk:.4f}",
            "" if score.expected_recall_topk is None else f"{score.expected_recall_topk:.4f}",
            f"{score.agreement_top1:.4f}",
            f"{score.log_prob_error:.4f}",
            f"{score.prob_error:.4f}",
            f"{score.accept_length:.3f}",
        ]
        for score in scores
    ]
    return render_table(headers, rows)
