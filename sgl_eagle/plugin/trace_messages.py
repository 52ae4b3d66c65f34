"""What the scheduler sends to the process that writes traces."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_eagle_harness.trace_schema import SamplingParams
from sgl_eagle_harness.types import BoolArray, Float32Array, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStarted:
    """A request's first decode step.

    Attributes:
        rid: The server's name of the request.
        prompt_id: Name in the trace.
        workload: Workload key.
        prompts: "text" or "random_tokens".
        sampling: Effective sampling parameters.
        ends_at: Tokens at which the model ends its text.
    """

    rid: str
    prompt_id: str
    workload: str
    prompts: str
    sampling: SamplingParams
    ends_at: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """One step of A recorded requests; nodes are those verified, or in dense mode all drafted.

    Attributes:
        rids: [A] names of the requests.
        position: [A] int64, completion tokens before the step.
        context_len: [A] int64, tokens before the root.
        root_token: [A] int64.
        emitted: [A, E] int64; the first `num_accept_tokens` count.
        num_accept_tokens: [A] int64, bonus token included.
        columns: [A, N] int64, the drafter's number of each node, ascending, `NO_NODE` is padding.
        tokens: [A, N] int64.
        parents: [A, N] int64, the drafter's number of the parent, `NO_NODE` for the root.
        depths: [A, N] int64.
        log_probs: [A, N] float32, of the path; in dense mode of the step.
    """

    rids: tuple[str, ...]
    position: IntArray
    context_len: IntArray
    root_token: IntArray
    emitted: IntArray
    num_accept_tokens: IntArray
    columns: IntArray
    tokens: IntArray
    parents: IntArray
    depths: IntArray
    log_probs: Float32Array

    @property
    def present(self) -> BoolArray:
        """[A, N] bool, which nodes are no padding."""
        return self.columns >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnded:
    """No further step of a request will come.

    Attributes:
        rid: The server's name of the request.
    """

    rid: str


Message = RequestStarted | StepRows | RequestEnded
