"""Progress on stderr: a bar for a person, two lines a stage for a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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


@contextmanager
def progress_counter(
    *, description: str, total: int, unit: str, quiet: bool
) -> Iterator[Callable[[int], None]]:
    """Show how far work is that reports its own advance.

    Args:
        description: What is done, e.g. "record".
        total: Units expected; the work may end with fewer.
        unit: Name of one unit.
        quiet: Show nothing (`args.quiet`).

    Yields:
        Function to call with the number of units done since its last call.
    """
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=total, desc=description, unit=unit, dynamic_ncols=True) as bar:

            def advance_bar(count: int) -> None:
                bar.update(count)

            yield advance_bar
    else:
        counts: list[int] = []
        print(f"{description} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        yield counts.append
        seconds = time.perf_counter() - start
        print(
            f"{description}: {sum(counts)} {unit} in {seconds:.1f} s", file=sys.stderr, flush=True
        )
