"""`sgl-eagle train`: a draft head for one target, from text that the target writes itself."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_eagle.cli.frame.arguments import UsageError, naming_flags, positive_int, seed_number
from sgl_eagle.cli.frame.output import render_table, write_result
from sgl_eagle.cli.frame.paths import require_writable_folder
from sgl_eagle.cli.pair_arguments import SMOLLM2

if TYPE_CHECKING:
    from sgl_eagle.reference.text_config import TextConfig
    from sgl_eagle.reference.train_config import TrainConfig
    from sgl_eagle.reference.train_state import CurvePoint

HELP = "train an EAGLE draft head for a target, from text that the target writes itself"

EPILOG = """example, on one GPU:
  sgl-eagle train --target smollm2 --kind eagle3 --out runs/head --tokens 40000000 --steps 3000
two GPUs: torchrun --nproc-per-node 2 -m sgl_eagle.cli train ..., with --text that exists;
the same text again for an EAGLE-1 head:
  sgl-eagle train --target smollm2 --kind eagle1 --out runs/head1 --text runs/head/text --steps 1000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sgl-eagle train`.

    Args:
        parser: The command's parser.
    """
    from sgl_eagle.reference.text_config import TextConfig
    from sgl_eagle.reference.train_config import TrainConfig

    text, training = TextConfig(), TrainConfig()
    parser.add_argument(
        "--target",
        default=SMOLLM2,
        help="directory in Hugging Face format, or %(default)s (default)",
    )
    parser.add_argument(
        "--kind",
        choices=("eagle3", "eagle1"),
        default=training.kind,
        help="generation of the head (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained head")
    parser.add_argument(
        "--text",
        type=Path,
        help="folder of generated text (default: OUT/text, filled first if it holds none)",
    )
    parser.add_argument(
        "--text-only", action="store_true", help="generate text into that folder and stop"
    )
    parser.add_argument(
        "--tokens",
        type=positive_int,
        default=text.num_tokens,
        help="tokens of text to generate (default: %(default)s)",
    )
    parser.add_argument(
        "--rows",
        type=positive_int,
        default=text.batch_size,
        help="dialogues written at once (default: %(default)s)",
    )
    parser.add_argument(
        "--max-length",
        type=positive_int,
        default=text.max_length,
        help="longest dialogue in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=training.num_updates,
        help="optimizer steps (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-tokens",
        type=positive_int,
        default=training.batch_tokens,
        help="tokens of one optimizer step (default: %(default)s)",
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=training.learning_rate,
        help="peak learning rate (default: %(default)s)",
    )
    parser.add_argument(
        "--eval-every",
        type=positive_int,
        default=training.eval_every,
        help="optimizer steps between evaluations and resumable states (default: %(default)s)",
    )
    parser.add_argument("--seed", type=seed_number, default=0, help="default: %(default)s")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the state in OUT, same options"
    )
    parser.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Generate text where there is none, train, report the curve.

    Args:
        args: The parsed arguments.

    Returns:
        0.

    Raises:
        UsageError: If `--text` names a folder without text, unless it is to be filled.
    """
    text_config, training = _configs(args)
    require_writable_folder(args.out, "--out")
    text_folder: Path = args.text or args.out / "text"
    import torch

    from sgl_eagle.reference.generate_text import write_text
    from sgl_eagle.reference.loading import load_target
    from sgl_eagle.reference.train import train_draft
    from sgl_eagle.reference.train_data import has_text, load_text, require_finished
    from sgl_eagle.reference.train_ranks import current_rank, join_ranks, leave_ranks
    from sgl_eagle_harness.output_folder import sole_writer

    filled = has_text(text_folder)
    if args.text is not None and not filled and not args.text_only:
        raise UsageError(
            f"--text {args.text} holds no text-*.safetensors: correct the path, or add --text-only "
            f"to generate text into it"
        )
    if filled and not args.text_only:
        require_finished(text_folder)
    device = join_ranks() or _device(args.device)
    first_process = current_rank() == 0
    with sole_writer(args.out) if first_process else nullcontext():
        target = load_target(args.target, dtype=torch.bfloat16, device=device)
        if args.text_only or not filled:
            num_tokens = write_text(
                target.model, target.tokenizer, text_config, text_folder, quiet=args.quiet
            )
            if args.text_only:
                result = {"text": str(text_folder), "num_tokens": num_tokens}
                message = f"wrote {num_tokens} tokens to {text_folder}"
                write_result(result, text=message, output_format=args.format)
                return 0
        curve = train_draft(
            target.model,
            load_text(text_folder),
            training,
            args.out,
            resume=args.resume,
            quiet=args.quiet,
        )
    leave_ranks()
    if first_process:
        _report(args, curve)
    return 0


def _configs(args: argparse.Namespace) -> tuple[TextConfig, TrainConfig]:
    from sgl_eagle.reference.text_config import TextConfig
    from sgl_eagle.reference.train_config import TrainConfig

    with naming_flags(max_length="--max-length", learning_rate="--lr"):
        return TextConfig(
            num_tokens=args.tokens,
            batch_size=args.rows,
            max_length=args.max_length,
            seed=args.seed,
        ), TrainConfig(
            kind=args.kind,
            num_updates=args.steps,
            batch_tokens=args.batch_tokens,
            learning_rate=args.lr,
            eval_every=args.eval_every,
            seed=args.seed,
        )


def _report(args: argparse.Namespace, curve: list[CurvePoint]) -> None:
    last = curve[-1]
    rows = [[str(step), f"{rate:.3f}"] for step, rate in enumerate(last.step_accept_rate, start=1)]
    table = render_table(["draft step", "accept rate"], rows)
    write_result(
        {"draft": str(args.out), "curve": curve},
        text=f"wrote {args.out}\n{table}\naccept length of a chain: {last.accept_length:.3f}",
        output_format=args.format,
    )


def _device(name: str | None) -> str:
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).item()  # the device "meta" holds no numbers
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device must be a device of this machine, got {name!r}") from error
    return name
