"""`sgl-eagle serve`: SGLang with the plugin, for a policy file."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from sgl_eagle.cli.frame.output import write_result
from sgl_eagle.plugin.server_flags import ALGORITHM_NAME, POLICY_FLAG

HELP = "serve a target with SGLang and SGL_EAGLE, or print the command that does"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sgl-eagle serve`.

    Args:
        parser: The command's parser.
    """
    parser.add_argument(
        "--target", metavar="MODEL", required=True, help="target, as SGLang's --model-path takes it"
    )
    parser.add_argument(
        "--draft", metavar="DIR", required=True, help="EAGLE-3 checkpoint for that target"
    )
    parser.add_argument(
        "--policy", metavar="FILE", type=Path, help="policy file (default: measure and adapt)"
    )
    parser.add_argument(
        "--print", dest="print_only", action="store_true", help="print the command, run nothing"
    )
    parser.add_argument(
        "server_flags", metavar="-- FLAG", nargs="*", help="passed on to SGLang's launch_server"
    )
    parser.epilog = (
        "The policy file sets the limits of the trees; SGLang's three speculative flags, after the "
        "two dashes, may raise them.\n"
        "example: sgl-eagle serve --target models/llama --draft models/eagle3 --policy policy.json "
        "-- --port 30000"
    )


def run(args: argparse.Namespace) -> int:
    """Check the policy file, then become the server.

    Args:
        args: `target`, `draft`, `policy`, `print_only`, `server_flags` and the options that every
            command has.

    Returns:
        0 after printing; a server that runs does not return.
    """
    from sgl_eagle_harness.policies.policy_file import load_policy_file

    policy = None if args.policy is None else load_policy_file(args.policy).build()
    command = server_command(args.target, args.draft, args.policy, args.server_flags)
    if not args.print_only:
        _become(command)
    write_result(
        {"policy": None if policy is None else policy.name, "command": command},
        text=shlex.join(command),
        output_format=args.format,
    )
    return 0


def _become(command: list[str]) -> NoReturn:
    if find_spec("sglang") is None:
        raise ModuleNotFoundError("No module named 'sglang'", name="sglang")
    sys.stderr.write(f"running {shlex.join(command)}\n")
    sys.stderr.flush()
    os.execv(command[0], command)


def server_command(
    target: str, draft: str, policy: Path | None, server_flags: list[str]
) -> list[str]:
    """The command that serves.

    Args:
        target: Path or name of the target.
        draft: Folder of the draft.
        policy: Policy file.
        server_flags: Further flags of SGLang.

    Returns:
        Words, the first of which is this Python.
    """
    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", target),
        *("--speculative-algorithm", ALGORITHM_NAME),
        *("--speculative-draft-model-path", draft),
        *(() if policy is None else (POLICY_FLAG, str(policy.resolve()))),
        *server_flags,
    ]
