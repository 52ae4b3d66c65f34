"""Watches decode steps: counts them, learns from them and records them, off the critical path.

The outcome of a step reaches the host when SGLang processes its result, one step later under
overlap scheduling, in order. So nothing here waits for the device: a step is noted when it is
launched and looked at when its result is there.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from sgl_eagle.plugin.compat_requests import is_on_host, is_over, still_running
from sgl_eagle.plugin.finished_step import (
    STEPS_LOOKED_AT_TOGETHER,
    Drafted,
    FinishedStep,
    Noted,
)
from sgl_eagle.plugin.foreseen_trees import note_common_sizes
from sgl_eagle.plugin.metrics_export import StepReport, describe_report
from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle_harness.shared_rows import same_truth
from sgl_eagle_harness.step_counts import StepCounts
from sgl_eagle_harness.types import BoolArray

logger = logging.getLogger(__name__)

SECONDS_PER_EXPORT = 1.0
SECONDS_PER_LOG_LINE = 10.0


class StepListener(Protocol):
    """Looks at finished steps; may keep them, though their results go."""

    def observe(self, step: FinishedStep) -> None:
        """Look at one.

        Args:
            step: Its tokens have not been added to the requests yet.
        """
        ...

    def forget(self, rid: str) -> None:
        """Drop what is kept of a request that has ended.

        Args:
            rid: Its name.
        """
        ...


class _Launched(NamedTuple):
    requests: list[Any]
    noted: Noted
    result: Any
    after_prefill: bool
    found_device_idle: bool


class StepObserver:
    """Follows every decode step of one worker."""

    def __init__(
        self,
        *,
        clock: RoundClock,
        runs_ahead: bool,
        listeners: tuple[StepListener, ...],
        patient: tuple[StepListener, ...] = (),
        gauges: Callable[[int], dict[str, float]],
        export: Callable[[StepReport], None] | None,
        dropped_ct: Callable[[], int] = lambda: 0,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start with nothing observed.

        Args:
            clock: The worker's; its totals are read with every report.
            runs_ahead: Whether a step is launched before the one before is known to be over.
            listeners: Look at every finished step.
            patient: Look at every finished step some steps later, and do without its tokens.
            gauges: Values to report, asked with the latest batch size.
            export: Takes every report; None where nobody reads any but the log's.
            dropped_ct: Steps that a recorder has lost since the start.
            now: Seconds on a clock that never goes back.
        """
        self._clock, self._listeners, self._patient = clock, listeners, patient
        self._runs_ahead = runs_ahead
        self._gauges, self._export, self._dropped_ct = gauges, export, dropped_ct
        self._now = now
        self._launched: deque[_Launched] = deque()
        self._after_prefill = True
        self._noted: Noted = None
        self._last_end = self._last_export = self._last_log = now()
        self._batch_size = 1
        self._counts = StepCounts()
        self._uncounted: list[FinishedStep] = []
        self._exported, self._logged = StepCounts(), StepCounts()
        self._dropped_exported = self._dropped_logged = 0
        self._stage_us_exported: dict[str, float] = {}

    @property
    def counts(self) -> StepCounts:
        """Everything since the start."""
        self._look_at_uncounted()
        return self._counts

    def prefilled(self) -> None:
        """Note that a prefill runs between two decode steps."""
        self._after_prefill = True

    def drafted(self, drafted: Drafted | Callable[[], Drafted]) -> None:
        """Note what was drafted for the step that is about to be launched.

        Args:
            drafted: Of all its requests, or what says so once the step is over: while no more than
                `STEPS_LOOKED_AT_TOGETHER` steps and the one on its way have followed.
        """
        self._noted = drafted

    def launched(self, requests: list[Any], result: Any) -> None:
        """Note a step.

        Args:
            requests: Of the batch; the same list in steps of the same requests, and not to be
                changed afterwards.
            result: SGLang's `GenerationBatchResult`; read once it is on the host.
        """
        before = self._launched[-1] if self._launched else None
        self._launched.append(
            _Launched(
                requests=requests,
                noted=self._noted,
                result=result,
                after_prefill=self._after_prefill,
                found_device_idle=(
                    self._runs_ahead and before is not None and is_on_host(before.result)
                ),
            )
        )
        self._noted = None
        self._after_prefill = False

    def completed(self, kept: Sequence[int]) -> None:
        """Look at the oldest step that was launched: its result is on the host.

        Args:
            kept: Drafts that the target kept, of each request of the step.
        """
        with self._clock.stage("watch"):
            self._look_at_oldest(kept)

    def _look_at_oldest(self, kept: Sequence[int]) -> None:
        if not self._launched:
            return
        launched = self._launched.popleft()
        if len(launched.requests) != len(kept):
            # Never seen; a listener must not learn from another step's tokens.
            logger.warning("SGL_EAGLE lost track of its steps and goes on with the next")
            self._launched.clear()
            return
        now = self._now()
        elapsed_us = None if launched.after_prefill else 1e6 * (now - self._last_end)
        self._last_end = now
        step = FinishedStep(
            requests=launched.requests,
            counted=self._counted(launched.requests),
            noted=launched.noted,
            kept=kept,
            result=launched.result,
            elapsed_us=elapsed_us,
            host_bound=self._was_host_bound(),
        )
        for listener in self._listeners:
            listener.observe(step)
        step.forget_result()
        self._batch_size = step.batch_size
        self._uncounted.append(step)
        if len(self._uncounted) >= STEPS_LOOKED_AT_TOGETHER:
            self._look_at_uncounted()
        if now - self._last_export >= SECONDS_PER_EXPORT:
            self.publish()

    def _was_host_bound(self) -> bool | None:
        # Of the step that is looked at. A host that takes turns with the device is all there is to
        # a round's time. Else the next step has been launched, or a prefill has, which takes other
        # times.
        if not self._runs_ahead:
            return True
        return self._launched[0].found_device_idle if self._launched else None

    def _counted(self, requests: list[Any]) -> BoolArray:
        # Under overlap scheduling the step after this one has been launched: of requests that had
        # ended or were retracted, it is not of the same ones.
        if self._launched and self._launched[-1].requests is requests:
            return same_truth(True, len(requests))
        return still_running(requests)

    def finished(self, rid: str) -> None:
        """Note the end of a request.

        Args:
            rid: Its name.
        """
        with self._clock.stage("watch"):
            for listener in (*self._listeners, *self._patient):
                listener.forget(rid)
            # While others decode, their steps report every second; afterwards nobody would.
            if not self._decodes_without(rid):
                self.publish()

    def _decodes_without(self, rid: str) -> bool:
        # Under overlap scheduling the step that is on its way may be of requests that are over.
        newest = self._launched[-1].requests if self._launched else ()
        return any(request.rid != rid and not is_over(request) for request in newest)

    def switched(self, num_requests: int) -> None:
        """Count changes between speculation and plain decoding.

        Args:
            num_requests: Requests that changed.
        """
        self._counts.tier_switch_ct += num_requests

    def publish(self) -> None:
        """Report what happened since the last report, to those who read it."""
        now = self._now()
        if self._export is not None:
            self._export(self._take_report())
        self._last_export = now
        if now - self._last_log >= SECONDS_PER_LOG_LINE:
            self._write_log_line()
            self._last_log = now

    def _take_report(self) -> StepReport:
        counts, stage_us, dropped_ct = self.counts, self._clock.total_us(), self._dropped_ct()
        report = StepReport(
            counts=counts.since(self._exported),
            stage_us={
                stage: us - self._stage_us_exported.get(stage, 0.0)
                for stage, us in stage_us.items()
            },
            gauges=self._gauges(self._batch_size),
            dropped_ct=dropped_ct - self._dropped_exported,
        )
        self._exported, self._stage_us_exported = counts.copy(), stage_us
        self._dropped_exported = dropped_ct
        return report

    def _write_log_line(self) -> None:
        counts, dropped_ct = self.counts, self._dropped_ct()
        report = StepReport(
            counts=counts.since(self._logged),
            stage_us={},
            gauges=self._gauges(self._batch_size),
            dropped_ct=dropped_ct - self._dropped_logged,
        )
        logger.info("SGL_EAGLE %s", describe_report(report))
        self._logged, self._dropped_logged = counts.copy(), dropped_ct

    def _look_at_uncounted(self) -> None:
        steps, self._uncounted = self._uncounted, []
        note_common_sizes(step.drafted for step in steps)
        for step in steps:
            self._count(step)
            for listener in self._patient:
                listener.observe(step)

    def _count(self, step: FinishedStep) -> None:
        self._counts.host_bound_ct += step.host_bound is True
        sizes = step.common_sizes
        if sizes is not None:
            self._counts.add_step_of_one_size(
                wanted=step.drafted is not None,
                num_drafted=sizes.num_drafted,
                num_draft_tokens=sizes.num_draft_tokens,
                depth=sizes.depth,
                num_correct_drafts=step.num_correct_drafts,
            )
            return
        rows = step.counted_rows
        depths = step.depths[rows]
        self._counts.add_step(
            wanted=step.speculating[rows],
            speculated=depths > 0,
            num_drafted=step.num_drafted[rows],
            num_draft_tokens=step.num_draft_tokens[rows],
            depths=depths,
            num_correct_drafts=step.num_accept_tokens[rows] - 1,
        )
