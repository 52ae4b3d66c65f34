"""What the actions of `sgl-eagle head` read: the draft's folder, text, shortlists."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sgl_eagle.cli.frame.arguments import UsageError
from sgl_eagle.cli.frame.progress import progress_counter
from sgl_eagle.cli.prompt_arguments import prompts_from

if TYPE_CHECKING:
    from torch import Tensor

    from sgl_eagle.reference.head_checkpoint import GlobalShortlist, LocalShortlist
    from sgl_eagle.reference.head_states import HeadStates
    from sgl_eagle.reference.pair import Pair
    from sgl_eagle.reference.prompts import Prompt


def draft_folder(args: argparse.Namespace) -> Path:
    """Where the draft lies.

    Args:
        args: The parsed arguments.

    Returns:
        `--draft`, or the shipped draft's folder.
    """
    from sgl_eagle.reference.pair import SHIPPED_DRAFT

    folder: Path = args.draft or SHIPPED_DRAFT
    return folder


def chosen_prompts(args: argparse.Namespace, split: Literal["tune", "held_out"]) -> list[Prompt]:
    """The prompts whose answers are looked at.

    Args:
        args: The parsed arguments.
        split: Which of them.

    Returns:
        At most `--limit` of each workload.
    """
    from sgl_eagle.reference.prompts import select_prompts

    return select_prompts(prompts_from(args), split=split, per_workload=args.limit)


def collect_states(args: argparse.Namespace, pair: Pair, prompts: list[Prompt]) -> HeadStates:
    """Let the target answer and run the draft along the answers.

    Args:
        args: The parsed arguments.
        pair: Target and draft.
        prompts: To answer.

    Returns:
        What the head reads.
    """
    from sgl_eagle.reference.head_states import collect_head_states

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


def count_tokens(
    args: argparse.Namespace, pair: Pair, states: HeadStates | None
) -> tuple[Tensor, list[str]]:
    """Count the tokens of everything that the arguments name.

    Args:
        args: The parsed arguments.
        pair: Target and draft.
        states: Answers to the tune prompts, None to leave them out.

    Returns:
        [V_draft] int64 occurrences by draft id, and what was counted, in words.
    """
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


def parse_shortlist(flag: str, text: str) -> GlobalShortlist | LocalShortlist:
    """Read a shortlist.

    Args:
        flag: The option that it was given with, for the message.
        text: `local:TILE:PER_TILE`, `natural:TILE:PER_TILE` or `global:CANDIDATES`.

    Returns:
        The shortlist.

    Raises:
        UsageError: If it is none.
    """
    try:
        chosen = _build_shortlist(text)
        chosen.build()
    except ValueError as error:
        raise UsageError(f"{flag}: {text!r}: {error}") from error
    return chosen


def _build_shortlist(text: str) -> GlobalShortlist | LocalShortlist:
    from sgl_eagle.reference.head_checkpoint import GlobalShortlist, LocalShortlist

    match text.split(":"):
        case ["global", count]:
            return GlobalShortlist(num_candidates=int(count))
        case [("local" | "natural") as kind, tile_size, per_tile]:
            return LocalShortlist(
                tile_size=int(tile_size),
                per_tile=int(per_tile),
                shuffle_seed=0 if kind == "local" else None,
            )
        case _:
            raise ValueError(
                "expected local:TILE:PER_TILE, natural:TILE:PER_TILE or global:CANDIDATES"
            )
