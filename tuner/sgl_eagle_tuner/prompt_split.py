"""Which prompts are tuned on, and which are only scored on."""

from __future__ import annotations

import numpy as np

from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.errors import TraceError

HELD_OUT_SHARE = 1 / 3


def split_prompts(
    trace: DenseTrace, *, seed: int, held_out_share: float = HELD_OUT_SHARE
) -> tuple[DenseTrace, DenseTrace]:
    """Split every workload's prompts at random.

    Prompts, not positions, are split: positions of one prompt share its text.

    Args:
        trace: At least two prompts of each workload.
        seed: Of the choice.
        held_out_share: Share of each workload's prompts to hold out, in (0, 1); at least one
            prompt goes to each side.

    Returns:
        The trace to tune on and the trace to score on.

    Raises:
        TraceError: If a workload has fewer than two prompts.
    """
    tuning: list[int] = []
    held_out: list[int] = []
    for workload in workloads_of(trace):
        prompts = [i for i, name in enumerate(trace.prompt_workloads) if name == workload]
        if len(prompts) == 1:
            raise TraceError(
                f"workload {workload!r} needs at least 2 prompts, one to tune on and one to score "
                f"on; the trace has 1"
            )
        num_held_out = min(max(round(held_out_share * len(prompts)), 1), len(prompts) - 1)
        order = np.random.default_rng(seed).permutation(prompts).tolist()
        held_out += order[:num_held_out]
        tuning += order[num_held_out:]
    return trace.select(prompts=sorted(tuning)), trace.select(prompts=sorted(held_out))


def workloads_of(trace: DenseTrace) -> list[str]:
    """Workloads in the order in which the trace first names them.

    Args:
        trace: Any trace.

    Returns:
        Distinct names.
    """
    return list(dict.fromkeys(trace.prompt_workloads))
