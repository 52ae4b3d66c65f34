"""Fits the shipped prior on dense traces.

python -m sgl_eagle.plugin.fit_prior TRACES... OUT
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from sgl_eagle.plugin.builtin_policy import PolicyPrior
from sgl_eagle_harness.atomic_file import write_text
from sgl_eagle_harness.calibration import IsotonicMap
from sgl_eagle_harness.calibration_fit import fit_calibration
from sgl_eagle_harness.continuation import ContinuationModel, fit_continuation
from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.errors import CalibrationError
from sgl_eagle_harness.trace_store import read_dense_trace
from sgl_eagle_harness.types import TreeLimits

TOPKS = (2, 4, 8)
CALIBRATED_DEPTHS = 8
"""Levels of a server whose flags are left out; deeper ones use the last curve. With the third for
the fourth and fifth, drafts of these are expected too seldom: a path that is as confident after
more levels is accepted more often."""
NUM_DIGITS = 4
"""Of the stored probabilities: more would pretend a precision that the fit does not have."""


def fit_prior(trace: DenseTrace, *, command: str) -> PolicyPrior:
    """Fit map and forecasts.

    Args:
        trace: Uncensored, of all workloads.
        command: What is run, for the record.

    Returns:
        The prior.

    Raises:
        CalibrationError: If the trace is too short, or holds fewer children than the widest
            forecast needs.
    """
    num_steps = trace.header.num_steps
    fitted_to = TreeLimits(num_steps=CALIBRATED_DEPTHS, topk=TOPKS[-1], num_draft_tokens=2)
    calibration = fit_calibration("isotonic", trace, fitted_to)
    if not isinstance(calibration, IsotonicMap):
        raise CalibrationError(f"the prior must be isotonic, got {type(calibration).__name__}")
    return PolicyPrior(
        target=trace.header.target.name,
        draft=trace.header.draft.name,
        num_positions=trace.num_positions,
        workloads=tuple(sorted(set(trace.prompt_workloads))),
        command=command,
        calibration=IsotonicMap(
            lowest_log=calibration.lowest_log,
            curves=tuple(_rounded(curve) for curve in calibration.curves),
        ),
        continuations=tuple(
            _rounded_model(
                fit_continuation(
                    trace,
                    calibration,
                    TreeLimits(num_steps=num_steps, topk=topk, num_draft_tokens=2),
                )
            )
            for topk in TOPKS
        ),
    )


def _rounded_model(model: ContinuationModel) -> ContinuationModel:
    return ContinuationModel(
        prob_edges=model.prob_edges,
        ratios=tuple(tuple(_rounded(row) for row in by_bin) for by_bin in model.ratios),
        ranked_probs=tuple(_rounded(probs) for probs in model.ranked_probs),
    )


def _rounded(values: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(round(value, NUM_DIGITS) for value in values)


def main(arguments: list[str]) -> int:
    """Read traces, write the prior.

    Args:
        arguments: Trace shards or folders of shards, and the file to write.

    Returns:
        0.
    """
    *traces, out = map(Path, arguments)
    command = shlex.join(["python", "-m", "sgl_eagle.plugin.fit_prior", *arguments])
    prior = fit_prior(read_dense_trace(traces), command=command)
    write_text(out, prior.model_dump_json() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
