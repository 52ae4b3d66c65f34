"""Progress on stderr: a bar for a person, two lines a stage for a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def progress(
    iterable: Iterable[T],
    *,
    description: str,
    total: int | None = None,
    unit: str = "it",
    quiet: bool = False,
) -> Iterator[T]:
    """Pass items through while showing how far the work is.

    Args:
        iterable: The work.
        description: What is done, e.g. "record chat".
        total: How many items there are, where `iterable` has no length.
        unit: Name of one item in the bar.
        quiet: Show nothing (`args.quiet`).

    Yields:
        The items, unchanged.
    """
    if quiet:
        yield from iterable
    elif sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(iterable, desc=description, total=total, unit=unit, dynamic_ncols=True)
    else:
        yield from _logged(iterable, description, unit)


def _logged(iterable: Iterable[T], description: str, unit: str) -> Iterator[T]:
    print(f"{description} ...", file=sys.stderr, flush=True)
    start = time.perf_counter()
    item_ct = 0
    for item in iterable:
        yield item
        item_ct += 1
    seconds = time.perf_counter() - start
    print(f"{description}: {item_ct} {unit} in {seconds:.1f} s", file=sys.stderr, flush=True)
