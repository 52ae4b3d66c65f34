"""The plugin's own flags, carried from the command line to the scheduler processes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from sgl_eagle_harness.errors import PolicyConfigError

ALGORITHM_NAME = "SGL_EAGLE"
"""Value of SGLang's --speculative-algorithm."""

# SGLang takes every variable that begins with SGL_ for an old name of its own.
POLICY_FLAG = "--sgl-eagle-policy"
POLICY_VARIABLE = "SGLEAGLE_POLICY"
COST_CACHE_FLAG = "--sgl-eagle-cost-cache"
COST_CACHE_VARIABLE = "SGLEAGLE_COST_CACHE"
LM_HEAD_FLAG = "--sgl-eagle-lm-head"
LM_HEAD_VARIABLE = "SGLEAGLE_LM_HEAD"
RECORD_FLAG = "--sgl-eagle-record"
RECORD_VARIABLE = "SGLEAGLE_RECORD"
RECORD_MODE_FLAG = "--sgl-eagle-record-mode"
RECORD_MODE_VARIABLE = "SGLEAGLE_RECORD_MODE"

NO_CACHE = "none"
"""Value of the cost cache that keeps nothing."""

RecordMode = Literal["ordinary", "dense"]
LmHead = Literal["full", "two-stage"]

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flag:
    """One flag and the environment variable that it sets."""

    name: str
    variable: str
    metavar: str
    help: str

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


_FLAGS = (
    _Flag(
        name=POLICY_FLAG,
        variable=POLICY_VARIABLE,
        metavar="FILE",
        help="policy file of SGL_EAGLE; without one it measures its costs and adapts",
    ),
    _Flag(
        name=COST_CACHE_FLAG,
        variable=COST_CACHE_VARIABLE,
        metavar="DIR",
        help=f"folder that keeps measured cost tables, or {NO_CACHE} (default: sgl-eagle/costs "
        "in XDG_CACHE_HOME or ~/.cache)",
    ),
    _Flag(
        name=LM_HEAD_FLAG,
        variable=LM_HEAD_VARIABLE,
        metavar="HEAD",
        help="LM head that the draft proposes with, full or two-stage (default: two-stage "
        "where the draft has one and there is one rank, else full)",
    ),
    _Flag(
        name=RECORD_FLAG,
        variable=RECORD_VARIABLE,
        metavar="DIR",
        help="folder for traces of what is served (default: record nothing)",
    ),
    _Flag(
        name=RECORD_MODE_FLAG,
        variable=RECORD_MODE_VARIABLE,
        metavar="MODE",
        help="ordinary keeps what is verified; dense drafts the largest tree at every position "
        "and commits one token a step (default: ordinary)",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """What the flags said.

    Attributes:
        policy: Policy file; None serves the built-in policy.
        cost_cache: Folder of measured cost tables; None keeps none.
        lm_head: Head that the draft proposes with; None takes the two-stage head where the
            draft has one and there is one rank.
        record: Folder for traces; None records nothing.
        record_mode: What is recorded.
    """

    policy: Path | None = None
    cost_cache: Path | None = None
    lm_head: LmHead | None = None
    record: Path | None = None
    record_mode: RecordMode = "ordinary"

    def __post_init__(self) -> None:
        if self.lm_head not in {None, *get_args(LmHead)}:
            raise PolicyConfigError(
                f"{LM_HEAD_FLAG} must be full or two-stage, got {self.lm_head!r}"
            )
        if self.record_mode not in get_args(RecordMode):
            raise PolicyConfigError(
                f"{RECORD_MODE_FLAG} must be ordinary or dense, got {self.record_mode!r}"
            )
        if self.record_mode == "dense" and self.record is None:
            raise PolicyConfigError(f"{RECORD_MODE_FLAG} dense needs a folder: add {RECORD_FLAG}")
        if self.record_mode == "dense" and self.policy is not None:
            raise PolicyConfigError(
                f"{RECORD_MODE_FLAG} dense drafts the largest trees whatever a policy says: leave "
                f"out {POLICY_FLAG}, got {self.policy}"
            )

    @property
    def records_dense(self) -> bool:
        """Whether every position gets the largest tree."""
        return self.record_mode == "dense"


def read_settings(environment: Mapping[str, str]) -> PluginSettings:
    """Read the variables that the flags set.

    Args:
        environment: Of the process.

    Returns:
        The settings.

    Raises:
        PolicyConfigError: If they make no sense together.
    """
    policy, record = environment.get(POLICY_VARIABLE), environment.get(RECORD_VARIABLE)
    return PluginSettings(
        policy=Path(policy) if policy else None,
        cost_cache=_cost_cache(environment),
        lm_head=environment.get(LM_HEAD_VARIABLE) or None,  # type: ignore[arg-type]  # checked there
        record=Path(record) if record else None,
        record_mode=environment.get(RECORD_MODE_VARIABLE) or "ordinary",  # type: ignore[arg-type]  # checked there
    )


def _cost_cache(environment: Mapping[str, str]) -> Path | None:
    named = environment.get(COST_CACHE_VARIABLE)
    if named == NO_CACHE:
        return None
    if named:
        return Path(named)
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "sgl-eagle" / "costs"


def add_flags() -> None:
    """Hook the flags into SGLang's parser, which has no interface for flags of plugins."""
    from sgl_eagle.plugin.compat import hook_registry

    registry, hook_type = hook_registry()
    registry.register(f"{_SERVER_ARGS}.add_cli_args", _declare_flags, hook_type.AFTER)
    registry.register(f"{_SERVER_ARGS}.from_cli_args", _export_flags, hook_type.BEFORE)


def _declare_flags(result: Any, parser: argparse.ArgumentParser) -> Any:
    for flag in _FLAGS:
        parser.add_argument(
            flag.name,
            dest=flag.dest,
            metavar=flag.metavar,
            help=f"{flag.help}; the variable {flag.variable} says the same",
        )
    return result


def _export_flags(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # The server's record keeps only its own fields; spawned schedulers inherit the environment.
    for value in (*args, *kwargs.values()):
        if not isinstance(value, argparse.Namespace):
            continue
        for flag in _FLAGS:
            given = getattr(value, flag.dest, None)
            if given is not None:
                os.environ[flag.variable] = given
    return args, kwargs
