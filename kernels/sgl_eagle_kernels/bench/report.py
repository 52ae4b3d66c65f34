"""One run as JSON and as an HTML page: numbers are made here, the template only places them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from sgl_eagle_kernels.bench.case import BenchResult, Environment, Measurement
from sgl_eagle_kernels.bench.head_cases import FULL, OUR_FULL
from sgl_eagle_kernels.bench.svg import inline_svg

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
timed only if it agreed with its reference on the same input. The full head that others are compared
with is torch's matrix product, log-softmax and top-k; the next column compares with the same
product ranked by our kernels. The byte floor reads every weight once at the memory ceiling; rows of
the full head that the shortlists of several rows share count once. The last column leaves out
{{ launches }} for each launch, which is what an empty kernel takes in a chain.</p>
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
            title += f", vocabulary {shape['V']}, hidden size {shape['H']}"
        else:
            title += f", topk {shape['topk']}"
        groups.setdefault(title, []).append(measurement)
    head = [
        "route", "rows", "median us", "p10 to p90", "against full head", "with our ranking",
        "of the byte floor", "without launches",
    ]  # fmt: skip
    return [
        Table(title=title, head=head, rows=[_row(one, group, result.environment) for one in group])
        for title, group in groups.items()
    ]


def _row(measurement: Measurement, group: list[Measurement], environment: Environment) -> list[str]:
    rows = _count_rows(measurement)
    name = [measurement.variant, str(rows or "")]
    if measurement.median_us is None:
        why = "" if measurement.parity == "equal" else f": {measurement.parity}"
        return [*name, f"not measured{why}", *[""] * 5]
    floor_us = measurement.floor_bytes / environment.ceiling_bytes_per_us
    working_us = working_time_us(measurement, environment)
    return [
        *name,
        f"{measurement.median_us:.1f}",
        f"{measurement.p10_us:.1f} to {measurement.p90_us:.1f}",
        _compare(measurement, group, FULL),
        _compare(measurement, group, OUR_FULL),
        f"{floor_us / measurement.median_us:.0%}",
        "" if working_us is None else f"{floor_us / working_us:.0%}",
    ]


def _compare(measurement: Measurement, group: list[Measurement], variant: str) -> str:
    rows = _count_rows(measurement)
    for one in group:
        if one.variant == variant and _count_rows(one) == rows and one.median_us is not None:
            return f"{one.median_us / (measurement.median_us or math.inf):.2f}x"
    return ""


def _count_rows(measurement: Measurement) -> int:
    return measurement.shape.get("rows", measurement.shape.get("B", 0))


def working_time_us(measurement: Measurement, environment: Environment) -> float | None:
    """Time of one call without what launches cost.

    Args:
        measurement: Of some case.
        environment: Of the same run.

    Returns:
        Microseconds; None where it was not timed or libraries decide what is launched.
    """
    if measurement.median_us is None or measurement.num_launches is None:
        return None
    working_us = measurement.median_us - measurement.num_launches * environment.launch_us
    return working_us if working_us > 0 else None


def draw_roofline(result: BenchResult) -> str:
    """Time of LM heads against bytes, with the line that the memory ceiling draws.

    The tree operators move too few bytes to be seen beside them.

    Args:
        result: One run.

    Returns:
        SVG.
    """
    figure = Figure(figsize=(9, 5))
    axes = figure.subplots()
    heads = [one for one in result.measurements if one.op == "lm_head"]
    timed = [one for one in heads if one.median_us is not None]
    for family in dict.fromkeys(_family(one) for one in timed):
        points = [one for one in timed if _family(one) == family]
        axes.loglog(
            [one.floor_bytes for one in points],
            [one.median_us for one in points],
            "o",
            label=family,
            alpha=0.7,
        )
    if timed:
        ends = [min(one.floor_bytes for one in timed), max(one.floor_bytes for one in timed)]
        ceiling = result.environment.ceiling_bytes_per_us
        axes.loglog(ends, [end / ceiling for end in ends], "-", color="gray", label="byte floor")
    axes.set_xlabel("bytes that must be read")
    axes.set_ylabel("median time, us")
    axes.legend()
    return inline_svg(figure)


def _family(measurement: Measurement) -> str:
    return measurement.variant.split(",")[0].rstrip("0123456789x ").removesuffix(" to")


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
        f"{where.commit}, {where.created}; memory ceiling "
        f"{where.ceiling_bytes_per_us / 1e6:.2f} TB/s"
    )
    template = jinja2.Environment(autoescape=True).from_string(TEMPLATE)
    return template.render(
        title=title,
        setting=setting,
        launches=f"{where.launch_us:.2f} us",
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
        The files.
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
