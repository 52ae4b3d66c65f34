"""`sgl-eagle export`: a target as SGLang can load it."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgl_eagle.cli.frame.arguments import UsageError
from sgl_eagle.cli.frame.output import write_result
from sgl_eagle.cli.frame.paths import require_empty_folder, require_writable_folder

HELP = "write a target in the Hugging Face format that SGLang loads"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sgl-eagle export`.

    Args:
        parser: The command's parser.
    """
    parser.add_argument(
        "--target",
        default="smollm2",
        metavar="MODEL",
        help="smollm2, a GGUF file, or a directory in Hugging Face format (default: smollm2)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="new folder for the target"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32", "float16"),
        default="bfloat16",
        help="type of the weights on disk (default: bfloat16)",
    )
    parser.epilog = (
        "Writes safetensors, tokenizer and chat template. SGLang's release of transformers reads\n"
        "no GGUF file.\n"
        "example: sgl-eagle export --target smollm2 --out models/smollm2"
    )


def run(args: argparse.Namespace) -> int:
    """Export.

    Args:
        args: Parsed arguments.

    Returns:
        0.

    Raises:
        UsageError: If `--out` holds anything, or is where the user stands.
    """
    require_writable_folder(args.out, "--out")
    require_empty_folder(args.out, "--out")
    if args.out.resolve() == Path.cwd():
        raise UsageError(f"--out {args.out} is the current folder, which the new one would replace")
    from sgl_eagle.reference.export_target import export_target
    from sgl_eagle.reference.loading import load_target
    from sgl_eagle.reference.pair import DTYPES

    loaded = load_target(args.target, dtype=DTYPES[args.dtype])
    export_target(loaded, args.out)
    num_parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    write_result(
        {
            "target": loaded.name,
            "out": args.out,
            "dtype": args.dtype,
            "num_parameters": num_parameters,
        },
        text=f"wrote {args.out}: {loaded.name}, {num_parameters / 1e6:.1f} million parameters in "
        f"{args.dtype}",
        output_format=args.format,
    )
    return 0
