"""From the raw results of a serving check to the numbers of its report: no text, no drawing."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from serving_engines import BUILTIN, backend_suffix

PLAIN = "sglang"
PLAIN_MARK = 0.97
"""SGL_EAGLE shall reach this share of plain decoding everywhere."""


@dataclass(frozen=True)
class Speed:
    """One engine at one concurrency.

    Attributes:
        tok_per_s: Tokens per second while all requests decode, median over repeats of the medians
            over log lines; where no line has all requests decoding, tokens of whole runs over their
            time, prefill and the last requests' tail included.
        lowest, highest: The same over single repeats.
        is_whole_run: Which of the two it is.
        accept_length: Tokens per verify pass, bonus included; 1 for plain decoding.
        step_ms: Mean time of a step that follows from the two.
        num_repeats, num_requests: Repeats, and requests of each.
    """

    tok_per_s: float
    lowest: float
    highest: float
    is_whole_run: bool
    accept_length: float
    step_ms: float
    num_repeats: int
    num_requests: int


def summarize_speeds(timing):
    """{(engine, concurrency): Speed} of the rows of a check."""
    groups = {}
    for row in timing:
        groups.setdefault((row["engine"], row["concurrency"]), []).append(row)
    return {key: _summarize(rows, key[1]) for key, rows in groups.items()}


def _summarize(rows, concurrency):
    full = [row["full_tok_per_s"] for row in rows if row["full_tok_per_s"] is not None]
    speeds = full or [row["tok_per_s"] for row in rows]
    accept_length = median(row["tokens_per_verify"] for row in rows)
    return Speed(
        tok_per_s=median(speeds),
        lowest=min(speeds),
        highest=max(speeds),
        is_whole_run=not full,
        accept_length=accept_length,
        step_ms=1000 * concurrency * accept_length / median(speeds),
        num_repeats=len(speeds),
        num_requests=rows[0]["num_requests"],
    )


def plain_like(name, _concurrency=None):
    """Plain SGLang with the attention backend of an engine."""
    return PLAIN + backend_suffix(name)


def best_builtin(speeds, name, concurrency):
    """SGLang's fastest own EAGLE-3 with the attention backend of an engine, at a concurrency.

    None where none was timed.
    """
    suffix = backend_suffix(name)
    names = [own + suffix for own in BUILTIN if (own + suffix, concurrency) in speeds]
    return max(names, key=lambda name: speeds[name, concurrency].tok_per_s, default=None)


def ratios(speeds, baseline_of):
    """{(engine, concurrency): speed over that of baseline_of(engine, concurrency)}, where known."""
    found = {}
    for (name, concurrency), speed in speeds.items():
        baseline = speeds.get((baseline_of(name, concurrency), concurrency))
        if baseline is not None:
            found[name, concurrency] = speed.tok_per_s / baseline.tok_per_s
    return found


def losses(speeds):
    """Where SGL_EAGLE misses a mark: (engine, concurrency, baseline, ratio), worst first."""
    found = []
    for (name, concurrency), speed in speeds.items():
        if not name.startswith("sgl-"):
            continue
        marks = [(plain_like(name), PLAIN_MARK), (best_builtin(speeds, name, concurrency), 1.0)]
        for baseline, mark in marks:
            other = speeds.get((baseline, concurrency))
            if other is not None and speed.tok_per_s < mark * other.tok_per_s:
                found.append((name, concurrency, baseline, speed.tok_per_s / other.tok_per_s))
    return sorted(found, key=lambda loss: loss[3])
