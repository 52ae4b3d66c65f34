"""Where the demo's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sgl_eagle_tuner.report.data import StageTime


class StageClock:
    """Wall time of named stages, in order.

    Attributes:
        stages: Finished stages.
    """

    def __init__(self) -> None:
        self.stages: list[StageTime] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[list[str]]:
        """Time a block.

        Args:
            name: What it does.

        Yields:
            Notes: what the block appends is joined and kept beside the time.
        """
        notes: list[str] = []
        started = time.perf_counter()
        yield notes
        self.stages.append(
            StageTime(
                name=name,
                seconds=time.perf_counter() - started,
                note=", ".join(notes) or None,
            )
        )
