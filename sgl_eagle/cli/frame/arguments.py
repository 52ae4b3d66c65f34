"""Parsers that refuse what they do not know and name what was probably meant."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from sgl_eagle_harness.errors import SglEagleError


class UsageError(SglEagleError, ValueError):
    """Arguments that parse one by one but make no sense together; exit code 2."""


@contextmanager
def naming_flags(**flags: str) -> Iterator[None]:
    """Let what a configuration refuses name the flag that the user typed, not its own field.

    Args:
        flags: Field to flag, e.g. `num_trials="--trials"`.

    Raises:
        UsageError: In place of an error that says what one of the fields must be.
        SglEagleError: Any other, as it was.
    """
    fields = "|".join(flags)
    # Not after a dash: a message that has the flag already keeps it.
    named = re.compile(rf"(?<![\w-])({fields})\b(?==| must| and)")
    try:
        yield
    except SglEagleError as error:
        message = named.sub(lambda match: flags[match[1]], str(error))
        if message == str(error):
            raise
        raise UsageError(message) from error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Suggest a correction.

    Args:
        word: What was typed.
        known: What would have been understood.

    Returns:
        "; did you mean X?", or an empty string where nothing known is close.
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def command_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Make the parser of one command, with the options that all commands share.

    Args:
        name: The command.
        description: What it does.

    Returns:
        A parser that takes no abbreviated options: a script that used one would change its meaning
        when a longer option is added.
    """
    parser = argparse.ArgumentParser(
        prog=f"sgl-eagle {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    shared = parser.add_argument_group("output")
    shared.add_argument(
        "--format",
        choices=("text", "json"),
        default="text",
        help="form of the result on stdout (default: text)",
    )
    shared.add_argument("--quiet", action="store_true", help="no progress, warnings only")
    shared.add_argument("--debug", action="store_true", help="log more; traceback on an error")
    return parser


def reject_unknown_options(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Stop at the first option that the parser does not have, before any other complaint.

    argparse reports a missing required option first, which hides that it was merely misspelt.

    Args:
        parser: A finished parser.
        argv: The command's arguments; exits with code 2 if one is an unknown long option.
    """
    known = parser._option_string_actions
    for argument in argv:
        if argument == "--":
            return
        option = argument.partition("=")[0]
        if option.startswith("--") and option not in known:
            parser.error(f"unknown option {option}{did_you_mean(option, known)}")


def positive_int(text: str) -> int:
    """Argument type: an integer of at least 1.

    Args:
        text: As typed.

    Returns:
        The number.

    Raises:
        ArgumentTypeError: If it is not an integer or is below 1; argparse adds the option's name.
    """
    return _int_from(text, 1)


def non_negative_int(text: str) -> int:
    """Argument type: an integer of at least 0.

    Args:
        text: As typed.

    Returns:
        The number.

    Raises:
        ArgumentTypeError: If it is not an integer or is below 0; argparse adds the option's name.
    """
    return _int_from(text, 0)


def num_steps(text: str) -> int:
    """Argument type: draft steps, as many as a tree may have levels.

    Args:
        text: As typed.

    Returns:
        The number.

    Raises:
        ArgumentTypeError: If it is not an integer in [1, 32]; argparse adds the option's name.
    """
    from sgl_eagle_harness.types import MAX_STEPS

    return _int_from(text, 1, MAX_STEPS)


def seed_number(text: str) -> int:
    """Argument type: a seed that every random generator in use takes.

    Args:
        text: As typed.

    Returns:
        The number.

    Raises:
        ArgumentTypeError: If it is not an integer in [0, 2^32); argparse adds the option's name.
    """
    return _int_from(text, 0, 2**32 - 1)


def _int_from(text: str, lowest: int, highest: int | None = None) -> int:
    allowed = f"of at least {lowest}" if highest is None else f"in [{lowest}, {highest}]"
    message = f"must be a whole number {allowed}, got {text!r}"
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(message) from None
    if number < lowest or (highest is not None and number > highest):
        raise argparse.ArgumentTypeError(message)
    return number
