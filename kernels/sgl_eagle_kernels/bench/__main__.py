"""`python -m sgl_eagle_kernels.bench`: parity, then times, then a report."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from sgl_eagle_kernels.bench.case import BenchResult
from sgl_eagle_kernels.bench.registry import Selection, make_cases
from sgl_eagle_kernels.bench.report import write_report
from sgl_eagle_kernels.bench.timing import describe_environment, measure_case


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all cases.

    Args:
        argv: Arguments; None takes them from the process.

    Returns:
        0 if every case agreed with its reference, 1 if not, 2 without a GPU.
    """
    args = _parser().parse_args(argv)
    if not torch.cuda.is_available():
        print("sgl_eagle_kernels.bench: error: needs a CUDA device", file=sys.stderr)  # noqa: T201
        return 2
    environment = describe_environment(num_samples=args.samples) if args.samples else None
    selection = Selection(shapes=args.shapes, rows=args.rows, ranks=args.ranks, plans=args.plans)
    measurements = []
    for case in tqdm(list(make_cases(selection)), desc="cases"):
        measurement = measure_case(case, num_samples=args.samples)
        measurements.append(measurement)
        if measurement.parity != "equal":
            tqdm.write(f"{case.label}: {measurement.parity}", file=sys.stderr)
        elif measurement.median_us is not None:
            tqdm.write(f"{case.label}: {measurement.median_us:.1f} us", file=sys.stderr)
    if environment is not None:
        gpu = re.sub(r"[^a-z0-9]+", "-", environment.gpu.lower()).strip("-")
        name = args.name or f"{environment.created[:10]}-{gpu}-kernels"
        result = BenchResult(environment=environment, measurements=measurements)
        for path in write_report(result, args.out, name):
            print(path)  # noqa: T201 (the result of the command)
    return int(any(one.parity != "equal" for one in measurements))


def _parser() -> argparse.ArgumentParser:
    defaults = Selection()
    parser = argparse.ArgumentParser(
        prog="python -m sgl_eagle_kernels.bench",
        description="Time the kernels on this GPU, each after it agreed with its reference.",
        epilog="example: python -m sgl_eagle_kernels.bench --shapes 128256x4096 --rows 1,8,64",
    )
    parser.add_argument("--out", type=Path, default=Path("reports/kernels"), help="folder")
    parser.add_argument("--name", help="name of the files (default: date, GPU, kernels)")
    parser.add_argument(
        "--samples",
        type=_samples,
        default=100,
        metavar="N",
        help="graph replays, at least 2; 0 only checks, and writes nothing (default: 100)",
    )
    parser.add_argument(
        "--shapes", type=_shapes, default=defaults.shapes, metavar="VxH,...", help="LM heads"
    )
    parser.add_argument("--rows", type=_numbers, default=defaults.rows, metavar="N,...")
    parser.add_argument("--ranks", type=_numbers, default=defaults.ranks, metavar="R,...")
    parser.add_argument(
        "--plans",
        action="store_true",
        help="time how the two-stage head of up to 8 rows may be cut, instead of all routes",
    )
    return parser


def _samples(text: str) -> int:
    number = int(text)
    if number < 0 or number == 1:
        raise argparse.ArgumentTypeError(f"must be 0 or at least 2, got {text!r}")
    return number


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text!r}")
    return numbers


def _shapes(text: str) -> list[tuple[int, int]]:
    pairs = [_numbers(part.replace("x", ",")) for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):  # noqa: PLR2004 (vocabulary and hidden size)
        raise argparse.ArgumentTypeError(f"must be like 128256x4096,49152x576, got {text!r}")
    return [(pair[0], pair[1]) for pair in pairs]


if __name__ == "__main__":
    sys.exit(main())
