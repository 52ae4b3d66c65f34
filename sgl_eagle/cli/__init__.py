"""The command line: one file per command, and the frame they share.

A command is a module of this package that is listed in `frame.commands.COMMANDS` and fulfils
`frame.commands.Command`. Only the chosen command's module is imported.
"""

from sgl_eagle.cli.frame.main import main

__all__ = ["main"]
