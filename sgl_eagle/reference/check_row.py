"""One finding of `sgl-eagle check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ok", "warning", "failed", "not checked"]
"""Warnings are what may be meant that way; "not checked" depends on something that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """What one check found.

    Attributes:
        name: What was looked at.
        outcome: How it ended.
        found: Values that the outcome rests on.
        fix: What to do about it; empty where nothing is to be done.
    """

    name: str
    outcome: Outcome
    found: str
    fix: str = ""


def ok(name: str, found: str) -> CheckRow:
    """A row that needs nothing.

    Args:
        name: What was looked at.
        found: What it was.

    Returns:
        The row.
    """
    return CheckRow(name=name, outcome="ok", found=found)


def warning(name: str, found: str, fix: str) -> CheckRow:
    """A row that may be a fault or may be meant.

    Args:
        name: What was looked at.
        found: What it was.
        fix: What to do if it is a fault.

    Returns:
        The row.
    """
    return CheckRow(name=name, outcome="warning", found=found, fix=fix)


def failed(name: str, found: str, fix: str) -> CheckRow:
    """A row with which the pair will not work.

    Args:
        name: What was looked at.
        found: What it was.
        fix: What to do.

    Returns:
        The row.
    """
    return CheckRow(name=name, outcome="failed", found=found, fix=fix)
