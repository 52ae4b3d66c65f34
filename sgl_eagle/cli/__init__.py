"""The command line: one file per command, and the frame they share.

A command is a module of this package that is listed in `frame.commands.COMMANDS` and fulfils
`frame.commands.Command`. Only the chosen command's module is imported.
"""

import sys
from collections.abc import Sequence

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; None takes them from the process.

    Returns:
        Exit code, as of `frame.main.main`.
    """
    try:
        # Here, so that Ctrl-C is answered from the first moment on.
        from sgl_eagle.cli.frame.main import main as run

        return run(argv)
    except KeyboardInterrupt:
        print("sgl-eagle: interrupted", file=sys.stderr)
        return INTERRUPTED


__all__ = ["main"]
