"""Reliability of confidences before and after calibration, on prompts that no fit has seen."""

from __future__ import annotations

import math

from sgl_eagle_harness.calibration import Calibration, IdentityMap
from sgl_eagle_harness.confidence import NodeSample, sample_nodes
from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.reliability import assess, reliability_bins
from sgl_eagle_harness.types import TreeLimits
from sgl_eagle_tuner.prompt_split import workloads_of
from sgl_eagle_tuner.report.analysis import CalibrationResult, ReliabilityBin, ReliabilityCurve

NUM_DIAGRAM_BINS = 10
"""Bins of equal width in a reliability diagram."""


def whole_tree(trace: DenseTrace) -> TreeLimits:
    """Limits that no recorded node exceeds.

    Args:
        trace: Any dense trace.

    Returns:
        Its greatest depth and branching; the number of draft tokens plays no part.
    """
    return TreeLimits(num_steps=trace.header.num_steps, topk=trace.header.topk, num_draft_tokens=2)


def check_calibration(
    calibration: Calibration, kind: str, held_out: DenseTrace, limits: TreeLimits
) -> list[CalibrationResult]:
    """Score a map on held-out prompts, all together and workload by workload.

    Args:
        calibration: Fitted map.
        kind: Its kind, for the result.
        held_out: Prompts that the fit has not seen.
        limits: Depth and branching of the nodes to judge.

    Returns:
        "all" first, then the workloads of the trace.
    """
    names = workloads_of(held_out)
    parts = {"all": held_out}
    if len(names) > 1:
        parts |= {name: held_out.select(workload=name) for name in names}
    else:
        parts |= {names[0]: held_out}
    return [_check_part(calibration, kind, name, part, limits) for name, part in parts.items()]


def _check_part(
    calibration: Calibration, kind: str, workload: str, held_out: DenseTrace, limits: TreeLimits
) -> CalibrationResult:
    sample = sample_nodes(held_out, limits)
    return CalibrationResult(
        workload=workload,
        before=_curve(IdentityMap(), "identity", sample),
        after=_curve(calibration, kind, sample),
        num_prompts=held_out.num_prompts,
        num_nodes=len(sample.accepted),
    )


def _curve(calibration: Calibration, kind: str, sample: NodeSample) -> ReliabilityCurve:
    probs = calibration.sample_accept_probs(sample)
    scores = assess(probs, sample.accepted)
    # Most nodes of a deep tree have next to no chance: bins of equal mass would crowd near zero.
    bins = reliability_bins(
        probs, sample.accepted, num_bins=NUM_DIAGRAM_BINS, binning="equal_width"
    )
    return ReliabilityCurve(
        kind=kind,
        bins=tuple(
            ReliabilityBin(
                confidence=point.mean_prob,
                accept_rate=point.accept_rate,
                low=point.interval_low,
                high=point.interval_high,
                count=point.num_nodes,
            )
            for point in bins
        ),
        ece=scores.ece,
        brier=scores.brier,
        auc=None if math.isnan(scores.auc) else scores.auc,
    )
