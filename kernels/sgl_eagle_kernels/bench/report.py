"""One run as JSON and as an HTML page: numbers are made here, the template only places them."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from sgl_eagle_kernels.bench.case import BenchResult, Measurement

BASELINE = "full head"

TEMPLATE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .2rem .7rem; text-align: right }
th { border-bottom: 2px solid #888 } td:first-child, th:first-child { text-align: left }
tr:nth-child(even) { background: #8881 } svg { max-width: 100%; height: auto }
</style>
<h1>{{ title }}</h1>
<p>{{ setting }}</p>
<p>Medians over CUDA graph replays; inputs rotate so that none is found in the cache. A kernel is
timed only if it agreed with its reference on the same input.</p>
{{ figure | safe }}
{% for table in tables %}
<h2>{{ table.title }}</h2>
<table><tr>{% for head in table.head %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% endfor %}
</html>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells as text.

    Attributes:
        title: Heading.
        head: Column titles.
        rows: Cells.
    """

    title: str
    head: list[str]
    rows: list[list[str]]


def build_tables(result: BenchResult) -> list[Table]:
    """Group measurements by operator and shape.

    Args:
        result: One run.

    Returns:
        One table for each vocabulary and hidden size, and one for each other operator.
    """
    groups: dict[str, list[Measurement]] = {}
    for measurement in result.measurements:
        shape = measurement.shape
        title = measurement.op
        if measurement.op == "lm_head":
            model = _model_shape(result, measurement)
            title += f", vocabulary {model[0]}, hidden size {model[1]}"
        else:
            title += f", topk {shape['topk']}"
        groups.setdefault(title, []).append(measurement)
    head = ["route", "rows", "median us", "p10 to p90", "of the byte floor", "against full head"]
    ceiling = result.environment.copy_bytes_per_us
    return [
        Table(title=title, head=head, rows=[_row(one, group, ceiling) for one in group])
        for title, group in groups.items()
    ]


def _model_shape(result: BenchResult, measurement: Measurement) -> tuple[int, int]:
    # A trimmed head belongs to the model whose cases it stands among: the last full head before it.
    before = result.measurements[: result.measurements.index(measurement) + 1]
    full = [one for one in before if one.variant == BASELINE]
    shape = full[-1].shape if full else measurement.shape
    return shape["V"], shape["H"]


def _row(measurement: Measurement, group: list[Measurement], ceiling: float) -> list[str]:
    shape = measurement.shape
    rows = shape.get("rows", shape.get("B", 0))
    if measurement.median_us is None:
        return [measurement.variant, str(rows), f"not timed: {measurement.parity}", "", "", ""]
    base = [
        one.median_us
        for one in group
        if one.variant == BASELINE and one.shape.get("rows") == rows and one.median_us is not None
    ]
    floor_us = measurement.floor_bytes / ceiling
    return [
        measurement.variant,
        str(rows),
        f"{measurement.median_us:.1f}",
        f"{measurement.p10_us:.1f} to {measurement.p90_us:.1f}",
        f"{floor_us / measurement.median_us:.0%}",
        f"{base[0] / measurement.median_us:.2f}x" if base else "",
    ]


def draw_roofline(result: BenchResult) -> str:
    """Time against bytes, with the line that the memory ceiling draws.

    Args:
        result: One run.

    Returns:
        SVG.
    """
    figure = Figure(figsize=(9, 5))
    axes = figure.subplots()
    timed = [one for one in result.measurements if one.median_us is not None]
    for op in dict.fromkeys(one.op for one in timed):
        points = [one for one in timed if one.op == op]
        axes.loglog(
            [one.floor_bytes for one in points], [one.median_us for one in points], "o", label=op
        )
    if timed:
        ends = [min(one.floor_bytes for one in timed), max(one.floor_bytes for one in timed)]
        ceiling = result.environment.copy_bytes_per_us
        axes.loglog(ends, [end / ceiling for end in ends], "-", color="gray", label="byte floor")
    axes.set_xlabel("bytes that must be read")
    axes.set_ylabel("median time, us")
    axes.legend()
    figure.tight_layout()
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def render_page(result: BenchResult, title: str) -> str:
    """The page of one run.

    Args:
        result: One run.
        title: Heading.

    Returns:
        HTML that needs no other file.
    """
    where = result.environment
    setting = (
        f"{where.gpu}, torch {where.torch}, triton {where.triton}, CUDA {where.cuda}, commit "
        f"{where.commit}, {where.created}; memory ceiling {where.copy_bytes_per_us / 1e6:.2f} TB/s"
    )
    template = jinja2.Environment(autoescape=True).from_string(TEMPLATE)
    return template.render(
        title=title,
        setting=setting,
        figure=draw_roofline(result),
        tables=build_tables(result),
    )


def write_report(result: BenchResult, folder: Path, name: str) -> list[Path]:
    """Write `name.json` and `name.html`.

    Args:
        result: One run.
        folder: Made if missing.
        name: Of the files, without suffix.

    Returns:
        The two files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        ".json": json.dumps(dataclasses.asdict(result), indent=1, allow_nan=False) + "\n",
        ".html": render_page(result, name),
    }
    files = []
    for suffix, text in texts.items():
        path = folder / f"{name}{suffix}"
        partial = folder / f".{name}{suffix}.partial"
        partial.write_text(text, "utf-8")
        os.replace(partial, path)  # noqa: PTH105
        files.append(path)
    return files
