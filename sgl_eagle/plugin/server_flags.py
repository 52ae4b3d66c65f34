"""`--sgl-eagle-policy FILE`, carried from the command line to the scheduler processes."""

from __future__ import annotations

import argparse
import os
from typing import Any

ALGORITHM_NAME = "SGL_EAGLE"
"""Value of SGLang's --speculative-algorithm."""

POLICY_FLAG = "--sgl-eagle-policy"

POLICY_VARIABLE = "SGL_EAGLE_POLICY"
"""Environment variable that names the policy file; the flag sets it."""

_DEST = "sgl_eagle_policy"
_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"


def add_policy_flag() -> None:
    """Hook the flag into SGLang's parser, which has no interface for flags of plugins."""
    from sgl_eagle.plugin.compat import hook_registry

    registry, hook_type = hook_registry()
    registry.register(f"{_SERVER_ARGS}.add_cli_args", _declare_flag, hook_type.AFTER)
    registry.register(f"{_SERVER_ARGS}.from_cli_args", _export_flag, hook_type.BEFORE)


def _declare_flag(result: Any, parser: argparse.ArgumentParser) -> Any:
    parser.add_argument(
        POLICY_FLAG,
        dest=_DEST,
        metavar="FILE",
        help=f"policy file of SGL_EAGLE (default: the variable {POLICY_VARIABLE})",
    )
    return result


def _export_flag(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # The server's record keeps only its own fields; spawned schedulers inherit the environment.
    for value in (*args, *kwargs.values()):
        policy = getattr(value, _DEST, None)
        if isinstance(value, argparse.Namespace) and policy is not None:
            os.environ[POLICY_VARIABLE] = policy
    return args, kwargs
