"""What the scheduler tells the process that writes traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_eagle.plugin.finished_step import Drafted
from sgl_eagle_harness.types import BoolArray, Float32Array, IntArray

NOT_RECORDED = -1
"""Number of a request whose rows are left out."""

_BYTES_PER_ROW, _BYTES_PER_NODE = 100, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStarted:
    """A request's first decode step; nothing that a client has sent is checked yet.

    Attributes:
        number: What its rows and its end are marked with; never used again.
        rid: The server's name of the request.
        label: What the client says about it; None where it says nothing.
        prompt_len: Prompt tokens.
        sampling: Fields of `SamplingParams`.
        ends_at: Tokens at which the model ends its text.
    """

    number: int
    rid: str
    label: Any
    prompt_len: int
    sampling: dict[str, float]
    ends_at: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsentStep:
    """One step of B requests as the scheduler's thread leaves it: nothing is copied or picked yet.

    Attributes:
        numbers: B numbers of requests, or `NOT_RECORDED`.
        counted: [B] bool; the others are not recorded in this step.
        position: B counts of completion tokens before the step.
        root_token: B roots.
        emitted: [B, E] int64; the first `num_accept_tokens` count.
        num_accept_tokens: [B] int64, bonus token included.
        drafted: What was drafted, put together later; None where all requests decoded plainly.
        dense: Whether all nodes are recorded, or those verified.
    """

    numbers: list[int]
    counted: BoolArray
    position: list[int]
    root_token: list[int]
    emitted: IntArray
    num_accept_tokens: IntArray
    drafted: Drafted | None
    dense: bool

    @property
    def num_bytes(self) -> int:
        """Memory that it holds, about."""
        num_nodes = 0 if self.drafted is None else int(self.drafted.num_drafted.sum())
        return _BYTES_PER_ROW * len(self.numbers) + _BYTES_PER_NODE * num_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """One step of B requests, for which N nodes were drafted.

    Attributes:
        numbers: [B] int64, numbers of the requests, or `NOT_RECORDED`.
        counted: [B] bool; the others are not recorded in this step.
        position: [B] int64, completion tokens before the step.
        root_token: [B] int64.
        num_accept_tokens: [B] int64, bonus token included.
        emitted: [B, E] int64; the first `num_accept_tokens` count.
        columns: [B, C] int64, nodes to record, ascending, `NO_NODE` is padding: those verified, or
            in dense mode all.
        tokens: [B, N] int64.
        parents: [B, N] int64, the parent's column, `NO_NODE` for the root.
        depths: [N] int64.
        log_probs: [B, N] float32, of the path; in dense mode of the step.
    """

    numbers: IntArray
    counted: BoolArray
    position: IntArray
    root_token: IntArray
    num_accept_tokens: IntArray
    emitted: IntArray
    columns: IntArray
    tokens: IntArray
    parents: IntArray
    depths: IntArray
    log_probs: Float32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnded:
    """No further step of a request will come.

    Attributes:
        number: That of its start.
    """

    number: int


Unsent = RequestStarted | UnsentStep | RequestEnded
"""What the scheduler's thread hands over."""

Message = RequestStarted | StepRows | RequestEnded
"""What arrives."""
