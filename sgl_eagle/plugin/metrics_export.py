"""Counts of decode steps for SGLang's Prometheus endpoint and its log."""

from __future__ import annotations

from collections import Counter as Tally
from dataclasses import dataclass, field
from typing import Any

from sgl_eagle_harness.step_counts import StepCounts

PREFIX = "sgl_eagle:"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What happened since the report before.

    Attributes:
        counts: Steps since then.
        stage_us: Host time of each stage since then, in microseconds.
        gauges: Values that hold now, by metric name without its prefix.
        dropped_ct: Steps since then that a full trace queue has lost.
    """

    counts: StepCounts
    stage_us: dict[str, float]
    gauges: dict[str, float] = field(default_factory=dict)
    dropped_ct: int = 0


_COUNTERS = {
    "steps": ("step_ct", "Decode steps of the whole batch."),
    "accept_tokens": ("accept_token_ct", "Tokens emitted by verify passes, bonus included."),
    "drafted_nodes": ("drafted_ct", "Nodes drafted, roots excluded."),
    "proposed_drafts": ("proposed_ct", "Drafts verified, roots and padding excluded."),
    "correct_drafts": ("correct_ct", "Drafts that the target kept."),
    "tier_switches": ("tier_switch_ct", "Changes between speculation and plain decoding."),
    "host_bound_steps": ("host_bound_ct", "Decode steps for which the host waited for no device."),
    "invalid_rows": ("invalid_row_ct", "Verify passes whose draft had no finite probability."),
}
"""Metric -> field of `StepCounts`, and what it counts."""


class PrometheusExport:
    """Adds reports to metrics of this process, which SGLang's endpoint collects.

    Must be made after SGLang has set PROMETHEUS_MULTIPROC_DIR, as it does before it starts its
    processes.
    """

    def __init__(self, *, model_name: str) -> None:
        """Register the metrics.

        Args:
            model_name: Label that SGLang's own metrics carry, too.
        """
        from prometheus_client import Counter, Gauge

        self._gauge_type = Gauge
        self._labels = {"model_name": model_name}
        names = list(self._labels)
        self._counters: dict[str, Any] = {
            name: Counter(f"{PREFIX}{name}", text, names) for name, (_, text) in _COUNTERS.items()
        }
        self._passes = Counter(
            f"{PREFIX}verify_passes", "Verify passes, one a request and step.", [*names, "tier"]
        )
        self._sizes = Counter(
            f"{PREFIX}verify_size_passes",
            "Verify passes by nodes verified, root included.",
            [*names, "num_draft_tokens"],
        )
        self._depths = Counter(
            f"{PREFIX}draft_depth_passes",
            "Verify passes by levels drafted; 0 is plain decoding.",
            [*names, "depth"],
        )
        self._stages = Counter(
            f"{PREFIX}host_stage_seconds",
            "Host time of decode rounds; decide, pack and watch are the plugin's own.",
            [*names, "stage"],
        )
        self._dropped = Counter(
            f"{PREFIX}trace_dropped_steps", "Steps that a full trace queue has lost.", names
        )
        self._gauges: dict[str, Any] = {}

    def add(self, report: StepReport) -> None:
        """Add one report.

        Args:
            report: Since the report before.
        """
        counts = report.counts
        for name, (attribute, _) in _COUNTERS.items():
            self._counters[name].labels(**self._labels).inc(getattr(counts, attribute))
        plain_ct = counts.row_ct - counts.speculated_ct
        by_tier = Tally(speculative=counts.speculated_ct, plain=plain_ct)
        for metric, label, tally in (
            (self._passes, "tier", by_tier),
            (self._sizes, "num_draft_tokens", counts.verify_size_ct),
            (self._depths, "depth", counts.depth_ct),
        ):
            for key, count in tally.items():
                metric.labels(**self._labels, **{label: str(key)}).inc(count)
        for stage, us in report.stage_us.items():
            self._stages.labels(**self._labels, stage=stage).inc(us / 1e6)
        self._dropped.labels(**self._labels).inc(report.dropped_ct)
        gauges = dict(report.gauges)
        if counts.accept_length is not None:
            gauges["accept_length"] = counts.accept_length
        for name, value in gauges.items():
            self._gauge(name).labels(**self._labels).set(value)

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            self._gauges[name] = self._gauge_type(
                f"{PREFIX}{name}",
                f"{name.replace('_', ' ').capitalize()}, most recent.",
                list(self._labels),
                multiprocess_mode="mostrecent",
            )
        return self._gauges[name]


def describe_report(report: StepReport) -> str:
    """One line for the log.

    Args:
        report: Of some seconds.

    Returns:
        E.g. "accept length 2.31, kept 1.31 of 6.20 proposed and 14.0 drafted, ...".
    """
    counts = report.counts
    if not counts.row_ct:
        return "no decode step"
    rows, steps = counts.row_ct, counts.step_ct
    parts = [
        f"accept length {counts.accept_token_ct / rows:.2f}",
        f"kept {counts.correct_ct / rows:.2f} of {counts.proposed_ct / rows:.2f} proposed and "
        f"{counts.drafted_ct / rows:.1f} drafted a pass",
        f"verify size {1 + counts.proposed_ct / rows:.1f}",
        f"depth {_mean(counts.depth_ct):.1f}",
        f"batch {rows / steps:.1f}",
        f"plain {1 - counts.speculated_ct / rows:.0%}",
        f"host-bound {counts.host_bound_ct / steps:.0%}",
        f"{counts.tier_switch_ct} tier switches",
    ]
    if "price_tok_per_us" in report.gauges:
        parts.append(f"price {1e6 * report.gauges['price_tok_per_us']:.1f} tok/s")
    if "scheduler_us" in report.gauges:
        parts.append(f"scheduler {report.gauges['scheduler_us']:.0f} us between rounds")
    if report.dropped_ct:
        parts.append(f"{report.dropped_ct} steps not recorded: the trace queue was full")
    return "; ".join(parts)


def _mean(tally: Tally[int]) -> float:
    total = sum(tally.values())
    return sum(key * count for key, count in tally.items()) / total if total else 0.0
