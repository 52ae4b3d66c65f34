"""Notes the steps of a server for the process that writes its traces."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sgl_eagle.plugin.compat_requests import (
    completion_lengths,
    custom_params,
    ends_at,
    last_tokens,
    prompt_length,
    sampling_of,
    shapes_its_text,
)
from sgl_eagle.plugin.finished_step import FinishedStep
from sgl_eagle.plugin.request_label import LABEL_KEY
from sgl_eagle.plugin.trace_messages import (
    NOT_RECORDED,
    RequestEnded,
    RequestStarted,
    Unsent,
    UnsentStep,
)

logger = logging.getLogger(__name__)


class TraceRecorder:
    """Listens to finished steps; the scheduler's thread only notes what will change by the next.

    Attributes:
        dropped_ct: Messages lost because the queue was full.
        num_left_out: Requests of a dense recording whose text something else than the target
            decides, and which are not recorded.
    """

    def __init__(self, send: Callable[[Unsent], bool], *, dense: bool) -> None:
        """Start with no request.

        Args:
            send: Takes a message, or says that there is no room for it.
            dense: Whether all drafted nodes are recorded, or those verified.
        """
        self._send, self._dense = send, dense
        self._number_of: dict[str, int] = {}
        self._num_started = 0
        self._requests: list[Any] = []
        self._numbers: list[int] = []
        self.dropped_ct = 0
        self.num_left_out = 0

    def observe(self, step: FinishedStep) -> None:
        """Record one step.

        Args:
            step: Its tokens have not been added to the requests yet.
        """
        requests = step.requests
        if requests != self._requests:
            self._number(step)
        if not self._numbers or max(self._numbers) == NOT_RECORDED:
            return
        self._post(
            UnsentStep(
                numbers=self._numbers,
                counted=step.counted,
                position=completion_lengths(requests),
                root_token=last_tokens(requests),
                emitted=step.emitted,
                num_accept_tokens=step.num_accept_tokens,
                drafted=step.drafted,
                dense=self._dense,
            )
        )

    def forget(self, rid: str) -> None:
        """Note the end of a request.

        Args:
            rid: Its name.
        """
        number = self._number_of.pop(rid, NOT_RECORDED)
        self._requests, self._numbers = [], []  # nothing of an ended request is kept
        if number != NOT_RECORDED:
            self._post(RequestEnded(number=number))

    def _number(self, step: FinishedStep) -> None:
        # Batches mostly stay what they were, so that nothing is looked up for each request.
        known = self._number_of
        for request, counted in zip(step.requests, step.counted.tolist(), strict=True):
            if counted and request.rid not in known:
                known[request.rid] = self._start(request)
        self._numbers = [known.get(request.rid, NOT_RECORDED) for request in step.requests]
        # A request that is not counted yet may be in the next step.
        self._requests = step.requests if step.counted.all() else []

    def _start(self, request: Any) -> int:
        if self._dense and shapes_its_text(request):
            self.num_left_out += 1
            logger.warning(
                "SGL_EAGLE does not record %s: a grammar, penalty, bias or filter decides its text",
                request.rid,
            )
            return NOT_RECORDED
        self._num_started += 1
        sent = self._post(
            RequestStarted(
                number=self._num_started,
                rid=request.rid,
                label=custom_params(request).get(LABEL_KEY),
                prompt_len=prompt_length(request),
                sampling=sampling_of(request),
                ends_at=ends_at(request),
            )
        )
        return self._num_started if sent else NOT_RECORDED

    def _post(self, message: Unsent) -> bool:
        sent = self._send(message)
        self.dropped_ct += not sent
        return sent
