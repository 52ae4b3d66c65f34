"""`sgl-eagle head factorize` and `sgl-eagle head train`."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from sgl_eagle.cli.frame.arguments import UsageError, naming_flags
from sgl_eagle.cli.frame.output import render_table, write_result
from sgl_eagle.cli.frame.paths import require_writable
from sgl_eagle.cli.head_inputs import (
    chosen_prompts,
    collect_states,
    count_tokens,
    draft_folder,
    parse_shortlist,
)
from sgl_eagle.cli.pair_arguments import load_pair_from, prepare_device

if TYPE_CHECKING:
    from sgl_eagle.reference.head_train_state import HeadCurvePoint


def factorize(args: argparse.Namespace) -> int:
    """Fit factors in closed form.

    Args:
        args: The parsed arguments.

    Returns:
        0.

    Raises:
        UsageError: If an option is out of range.
    """
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

    if not 0 < args.smoothing < math.inf:
        raise UsageError(f"--smoothing must be finite and above 0, got {args.smoothing}")
    shortlist = None if args.activate is None else parse_shortlist("--activate", args.activate)
    path = draft_folder(args) / FACTORS_FILE
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
            states = collect_states(args, pair, chosen_prompts(args, "tune"))
        counts, sources = count_tokens(args, pair, states)
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
        activate_head(draft_folder(args), shortlist)
    write_result(
        {"factors": path, "info": info, "activated": shortlist},
        text=f"wrote {path}: rank {info.rank} by {info.method}, relative error "
        f"{info.relative_error:.3f}" + (f"\nactivated {args.activate}" if args.activate else ""),
        output_format=args.format,
    )
    return 0


def train(args: argparse.Namespace) -> int:
    """Train factors.

    Args:
        args: The parsed arguments.

    Returns:
        0.

    Raises:
        UsageError: If an option is missing or out of range.
    """
    if args.text is None:
        raise UsageError("head train needs --text, text that `sgl-eagle train --text-only` writes")
    prepare_device(args)
    from sgl_eagle.reference.draft_checkpoint import load_draft
    from sgl_eagle.reference.head_checkpoint import (
        FACTORS_FILE,
        FactorsInfo,
        activate_head,
        save_factors,
    )
    from sgl_eagle.reference.head_factors import relative_error, row_norms
    from sgl_eagle.reference.head_train import HeadTrainConfig, train_factors
    from sgl_eagle.reference.head_train_state import HeadTrainFolder
    from sgl_eagle.reference.loading import load_target
    from sgl_eagle.reference.pair import DTYPES
    from sgl_eagle.reference.train_data import load_text
    from sgl_eagle_harness.output_folder import sole_writer

    shortlist = None if args.activate is None else parse_shortlist("--activate", args.activate)
    folder = draft_folder(args)
    path = folder / FACTORS_FILE
    require_writable(path, "--draft")
    with naming_flags(learning_rate="--lr"):
        config = HeadTrainConfig(
            rank=args.rank,
            num_updates=args.steps,
            batch_tokens=args.batch_tokens,
            learning_rate=args.lr,
            num_steps=args.num_steps,
            eval_every=args.eval_every,
            seed=args.seed,
        )
    with sole_writer(path.parent):
        rows = load_text(args.text)
        model = load_target(args.target, dtype=DTYPES[args.dtype], device=args.device).model
        draft = load_draft(
            folder,
            embed_tokens=model.model.embed_tokens.weight.detach(),
            lm_head=model.lm_head.weight.detach(),
            num_target_layers=model.config.num_hidden_layers,
            dtype=DTYPES[args.dtype],
            device=model.lm_head.weight.device,
        )
        factors, curve = train_factors(
            model,
            draft,
            rows,
            config,
            HeadTrainFolder(path.parent),
            resume=args.resume,
            quiet=args.quiet,
        )
        info = FactorsInfo(
            method="trained",
            rank=args.rank,
            vocab_size=draft.lm_head.shape[0],
            relative_error=relative_error(draft.lm_head, factors),
            row_norms=row_norms(draft.lm_head),
            num_tokens=args.steps * args.batch_tokens,
            smoothing=0,
            text="text of training",
        )
        save_factors(path, factors, info)
        if shortlist is not None:
            activate_head(folder, shortlist)
    write_result(
        {"factors": path, "info": info, "activated": shortlist, "curve": curve},
        text=f"wrote {path}: rank {info.rank}, trained\n{_curve_table(curve)}",
        output_format=args.format,
    )
    return 0


def _curve_table(curve: list[HeadCurvePoint]) -> str:
    rows = [
        [
            str(point.update),
            f"{sum(point.step_kl) / len(point.step_kl):.4f}",
            f"{point.recall:.4f}",
            f"{point.seconds:.0f} s",
        ]
        for point in curve
    ]
    return render_table(["update", "divergence in nats", "recall", "time"], rows)
