"""What `--prompts` means, shared by the engine's commands."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgl_eagle.reference.prompts import Prompt
    from sgl_eagle_harness.trace_schema import PromptSource


def prompts_from(args: argparse.Namespace) -> list[Prompt]:
    """Read the files that `--prompts` names, or the shipped prompts where it names none.

    Args:
        args: Parsed arguments with `prompts`.

    Returns:
        All of their prompts.
    """
    from sgl_eagle.reference.prompts import load_prompts, load_shipped_prompts

    return load_prompts(args.prompts) if args.prompts else load_shipped_prompts()


def prompt_source(paths: Sequence[Path] | None) -> PromptSource:
    """Provenance of prompts.

    Args:
        paths: Prompt files; none means those that ship with the package.

    Returns:
        Names and digests.
    """
    from sgl_eagle.reference.prompts import shipped_prompt_files
    from sgl_eagle_harness.trace_schema import PromptSource, SourceFile

    return PromptSource(
        kind="text",
        files=tuple(
            SourceFile(name=file.name, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
            for file in paths or shipped_prompt_files()
        ),
    )
