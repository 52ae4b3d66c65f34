"""Prompt files, JSON Lines with one prompt a line, and the five workloads that are shipped."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from sgl_eagle_harness.errors import PromptError

Workload = Literal["chat", "code", "math", "summary", "qa"]
Split = Literal["tune", "held_out"]

WORKLOADS: tuple[Workload, ...] = ("chat", "code", "math", "summary", "qa")

_Text = Annotated[str, StringConstraints(pattern=r"\S")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a user asks, and what kind of text the answer will be.

    Attributes:
        id: Unique over all files that are used together.
        workload: The policy is tuned for each workload separately.
        split: "tune" for recording and search, "held_out" for measuring their result; None where
            the file does not say.
        turns: User messages in order, at least one; the model answers each before the next.
    """

    id: str
    workload: Workload
    split: Split | None = None
    turns: tuple[str, ...]


class _PromptLine(BaseModel):
    """One line of a prompt file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: _Text
    """Unique name."""
    workload: Workload
    """Kind of text."""
    split: Split | None = None
    """What the prompt may be used for."""
    category: str | None = None
    """A finer kind that benchmarks give their prompts; read, not used."""
    turns: Annotated[list[_Text], Field(min_length=1)]
    """User messages."""


def load_prompts(paths: Sequence[Path]) -> list[Prompt]:
    """Read prompt files.

    Args:
        paths: JSON Lines files; each line is an object with `id`, `workload`, `turns` and
            optionally `split` and `category`. Blank lines are skipped.

    Returns:
        All prompts, in the order of the files and lines.

    Raises:
        PromptError: If a file is missing, not UTF-8 text or holds no prompt, if a line is
            malformed, or if an id occurs twice; names file and line.
    """
    return _load(paths)


def load_shipped_prompts(
    workloads: Sequence[Workload] = WORKLOADS, split: Split | None = None
) -> list[Prompt]:
    """Read the prompts that ship with the package: 36 for each workload, every third held out.

    Args:
        workloads: Which ones.
        split: Only this split; None for both.

    Returns:
        Prompts in the order of `workloads`.
    """
    prompts = _load(shipped_prompt_files(workloads))
    return [prompt for prompt in prompts if split in {None, prompt.split}]


def select_prompts(
    prompts: Sequence[Prompt], *, split: Split | None = None, per_workload: int | None = None
) -> list[Prompt]:
    """Some of the prompts.

    Args:
        prompts: All of them.
        split: Only this split; None for all. Prompts that name no split belong to every one.
        per_workload: Only so many of each workload, from the front; None for all.

    Returns:
        The selection, in the same order.

    Raises:
        PromptError: If nothing is left.
    """
    chosen: list[Prompt] = []
    count: dict[str, int] = {}
    for prompt in prompts:
        if split is not None and prompt.split not in {None, split}:
            continue
        count[prompt.workload] = count.get(prompt.workload, 0) + 1
        if per_workload is None or count[prompt.workload] <= per_workload:
            chosen.append(prompt)
    if not chosen:
        raise PromptError(f"none of the {len(prompts)} prompts belongs to the split {split!r}")
    return chosen


def shipped_prompt_files(workloads: Sequence[Workload] = WORKLOADS) -> list[Traversable]:
    """The prompt files that come with the package.

    Args:
        workloads: Which ones.

    Returns:
        One for each workload, in their order.
    """
    folder = importlib.resources.files("sgl_eagle") / "assets" / "prompts"
    return [folder / f"{workload}.jsonl" for workload in workloads]


def _load(paths: Sequence[Path | Traversable]) -> list[Prompt]:
    prompts: dict[str, Prompt] = {}
    first_seen: dict[str, str] = {}
    for path in paths:
        count_before = len(prompts)
        for place, prompt in _read(path):
            if prompt.id in prompts:
                raise PromptError(
                    f"{place}: id {prompt.id!r} was used before, in {first_seen[prompt.id]}"
                )
            prompts[prompt.id] = prompt
            first_seen[prompt.id] = place
        if len(prompts) == count_before:
            raise PromptError(f"{path}: holds no prompt; a line like {_EXAMPLE} is expected")
    return list(prompts.values())


_EXAMPLE = '{"id": "qa-1", "workload": "qa", "turns": ["Why is the sky blue?"]}'


def _read(path: Path | Traversable) -> Iterator[tuple[str, Prompt]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PromptError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    # Not splitlines(): JSON strings may hold U+2028 and its kin, which it would break at.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            yield place, _parse(line, place)


def _parse(line: str, place: str) -> Prompt:
    try:
        fields = _PromptLine.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the line"
        raise PromptError(f"{place}: {field}: {first['msg']}, got {first['input']!r:.80}") from None
    return Prompt(
        id=fields.id, workload=fields.workload, split=fields.split, turns=tuple(fields.turns)
    )
