"""`sgl-eagle COMMAND ...`: dispatch, logging, and what each ending looks like."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from sgl_eagle.cli.frame.arguments import (
    UsageError,
    command_parser,
    did_you_mean,
    reject_unknown_options,
)
from sgl_eagle.cli.frame.commands import COMMANDS, load_command, read_help
from sgl_eagle.cli.frame.extras import missing_extra
from sgl_eagle_harness.errors import SglEagleError

FAILED = 1
WRONG_USAGE = 2
SIGNALLED = 128  # plus the signal's number, as shells report it


TERMINATING = [
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
]  # Windows has no SIGHUP


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which end a command as Ctrl-C does: what was finished is kept.

    Attributes:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Help and arguments that do not parse leave through `SystemExit`, as argparse does.

    Args:
        argv: Arguments after the program's name; None takes them from the process.

    Returns:
        Exit code: 0 done, 1 failed, 2 wrong usage; 130, 143 or 129 if Ctrl-C, SIGTERM or SIGHUP
        ended it.

    Raises:
        ModuleNotFoundError: If a module is missing that no extra brings, which is a defect.
    """
    _open_closed_streams()
    owns_process = argv is None  # else a signal is the caller's to answer
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0].startswith("-"):
        return _without_command(argv)
    name = argv[0]
    if name not in COMMANDS:
        _top_parser().error(f"there is no command {name!r}{did_you_mean(name, COMMANDS)}")
    try:
        with _termination_as_interrupt() if owns_process else nullcontext():
            return _run_command(name, argv[1:])
    except SglEagleError as error:
        return _report_failure(name, error, debug="--debug" in argv)
    except ModuleNotFoundError as error:
        advice = missing_extra(name, error)
        if advice is None:
            raise
        return _report_failure(name, advice, debug="--debug" in argv)
    except BrokenPipeError:
        return FAILED  # `| head` has seen enough: nothing to report, and nobody to report it to
    except Terminated as stop:
        print(f"sgl-eagle {name}: terminated by {stop}", file=sys.stderr)
        return SIGNALLED + stop.number
    except KeyboardInterrupt:
        print(f"sgl-eagle {name}: interrupted", file=sys.stderr)
        return SIGNALLED + signal.SIGINT


def _open_closed_streams() -> None:
    # A shell's `>&-` closes one. The next file opened would take its number, and with it whatever a
    # library prints; and Python prints errors to stdout where stderr is missing.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115  for good
            setattr(sys, name, stream)


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    # Left as they are: signals that somebody handles or ignores already, as nohup does.
    numbers = [number for number in TERMINATING if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, _terminate)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _terminate(number: int, _: FrameType | None) -> None:
    raise Terminated(number)


def _run_command(name: str, argv: Sequence[str]) -> int:
    command = load_command(name)
    parser = command_parser(name, command.HELP)
    command.add_arguments(parser)
    reject_unknown_options(parser, argv)
    args = parser.parse_args(argv)
    _configure_logging(quiet=args.quiet, debug=args.debug)
    return command.run(args)


def _without_command(argv: Sequence[str]) -> int:
    parser = _top_parser()
    lines = [f"  {name:<10} {read_help(name)}" for name in COMMANDS]
    parser.epilog = "\n".join(
        ["commands:", *lines, "", "`sgl-eagle COMMAND --help` explains one and shows an example."]
    )
    parser.parse_args(argv)
    parser.print_help(sys.stderr)
    return WRONG_USAGE


def _top_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sgl-eagle",
        usage="sgl-eagle COMMAND [options]",
        description="Speculative decoding that pays: measure, tune and explain draft trees.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version("sgl-eagle")
        except PackageNotFoundError:
            number = "(not installed, run from its source)"
        # As argparse prints help: where it cannot be written, nobody reads it.
        parser._print_message(f"sgl-eagle {number}\n", sys.stdout)
        parser.exit()


def _configure_logging(*, quiet: bool, debug: bool) -> None:
    level = logging.DEBUG if debug else logging.WARNING if quiet else logging.INFO
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s", force=True)
    for package in ("sgl_eagle", "sgl_eagle_harness", "sgl_eagle_kernels", "sgl_eagle_tuner"):
        logging.getLogger(package).setLevel(level)


def _report_failure(name: str, error: SglEagleError, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    print(f"sgl-eagle {name}: error: {error}", file=sys.stderr)
    return WRONG_USAGE if isinstance(error, UsageError) else FAILED
