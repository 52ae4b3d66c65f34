"""Which commands exist, and what a command's module must offer."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.resources
from typing import Protocol, cast

COMMANDS = (
    "demo",
    "record",
    "profile",
    "calibrate",
    "replay",
    "tune",
    "report",
    "check",
    "validate",
    "train",
    "head",
    "export",
    "inflate",
    "serve",
)
"""In the order in which `sgl-eagle --help` lists them: `sgl_eagle.cli.<name>` holds each."""


class Command(Protocol):
    """A module of `sgl_eagle.cli`."""

    HELP: str
    """What the command does, in one line."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments; set `parser.epilog` to an example.

        Args:
            parser: The command's own parser, which has `--format`, `--quiet` and `--debug` already.
        """
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do the work: results on stdout, everything else on stderr.

        Args:
            args: The parsed arguments, with `format` ("text" or "json"), `quiet` and `debug`.

        Returns:
            Exit code: 0 done, 1 failed.
        """
        ...


def load_command(name: str) -> Command:
    """Import one command.

    Args:
        name: One of `COMMANDS`.

    Returns:
        Its module.
    """
    return cast("Command", importlib.import_module(f"sgl_eagle.cli.{name}"))


def read_help(name: str) -> str:
    """Read a command's one line of help from its source.

    The list of commands must appear at once and on any install, but importing a command may bring
    torch, which takes seconds or is missing.

    Args:
        name: One of `COMMANDS`.

    Returns:
        Its `HELP`.

    Raises:
        LookupError: If the module assigns no literal to `HELP`, which is a defect.
    """
    source = (importlib.resources.files("sgl_eagle.cli") / f"{name}.py").read_text(encoding="utf-8")
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="HELP")], value=ast.Constant(value=str(text))):
                return text
    raise LookupError(f"sgl_eagle/cli/{name}.py assigns no string to HELP")
