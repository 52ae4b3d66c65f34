"""The command line: one file per command, and the frame they share.

A command is a module of this package that is listed in `frame.commands.COMMANDS` and fulfils
`frame.commands.Command`. Commands import torch, transformers, optuna and the like inside `run`, so
that help is quick and works on a base install.
"""

from sgl_eagle.cli.frame.main import main

__all__ = ["main"]
