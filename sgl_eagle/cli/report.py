"""`sgl-eagle report`: the HTML page of a finished run."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgl_eagle.cli.frame.output import write_result
from sgl_eagle.cli.frame.paths import require_not_read, require_writable

HELP = "render a run's numbers (report.json) as one self-contained HTML page"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sgl-eagle report`.

    Args:
        parser: The command's parser.
    """
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, help="folder that holds report.json"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="page to write (default: report.html in RUN_DIR)",
    )
    parser.epilog = "example: sgl-eagle report runs/demo --out demo.html"


def run(args: argparse.Namespace) -> int:
    """Read the numbers, render the page, write it.

    Args:
        args: `run_dir`, `out` and the options that every command has.

    Returns:
        0.
    """
    from sgl_eagle_harness.atomic_file import write_text
    from sgl_eagle_tuner.report.data import REPORT_FILE, load_report
    from sgl_eagle_tuner.report.render import render_report

    out: Path = args.out or args.run_dir / "report.html"
    numbers: Path = args.run_dir / REPORT_FILE
    require_writable(out, "--out" if args.out else "RUN_DIR")
    require_not_read(out, "--out", "RUN_DIR", [numbers])
    html = render_report(load_report(numbers))
    write_text(out, html)
    result = {"report": str(out), "num_bytes": len(html.encode("utf-8"))}
    write_result(result, text=f"wrote {out}", output_format=args.format)
    return 0
