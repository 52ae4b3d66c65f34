"""Renders the results of a serving check as one HTML page.

python tests/gpu/serving/serving_page.py RESULTS.json --title TITLE --out PAGE.html
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent))

from serving_engines import ENGINES, backend_suffix, without_backend
from serving_summary import best_builtin, losses, plain_like, ratios, summarize_speeds

from sgl_eagle_harness.atomic_file import write_text
from sgl_eagle_kernels.bench.svg import inline_svg

TEMPLATE = Path(__file__).with_name("serving_page.html.j2")
_PLAIN = ("black", "#888888")
_BUILTIN = ("#9ecae1", "#4292c6", "#08519c", "#002a5c", "#756bb1")
_OURS = ("#fdae6b", "#d94801", "#31a354", "#006d2c", "#e7298a", "#7a0177", "#bcbd22")


def render_page(results, title):
    """The page as text."""
    speeds = summarize_speeds(results.get("timing", []))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    against_plain = ratios(speeds, plain_like)
    against_builtin = ratios(speeds, partial(best_builtin, speeds))
    return template.render(
        title=title,
        provenance=results["provenance"],
        failures=results["failures"],
        unfinished=results.get("unfinished", []),
        prompt_tokens=results.get("prompt_tokens", []),
        figures=[
            _draw("tokens per second", {key: s.tok_per_s for key, s in speeds.items()}, log=True),
            _draw("speed over plain SGLang", against_plain, line=1.0),
            _draw("speed over SGLang's best EAGLE-3", against_builtin, line=1.0),
        ]
        if speeds
        else [],
        concurrencies=sorted({concurrency for _, concurrency in speeds}),
        engines=_in_order(name for name, _ in speeds),
        speeds=speeds,
        against_plain=against_plain,
        against_builtin=against_builtin,
        losses=losses(speeds),
        host_rows=[row for row in results.get("timing", []) if row["host_us"]],
        start_s=results.get("start_s", {}),
        capture_s=results.get("capture_s", {}),
        gpu_mib=results.get("gpu_mib", {}),
        equality=results.get("equality", []),
        sampling=results.get("sampling", []),
    )


def _draw(label, values, *, log=False, line=None):
    figure = Figure(figsize=(6.4, 4.2))
    axes = figure.add_subplot()
    names = _in_order(name for name, _ in values)
    for name in names:
        points = sorted(
            (concurrency, value) for (n, concurrency), value in values.items() if n == name
        )
        axes.plot(*zip(*points, strict=True), marker="o", label=name, color=_colour(name, names))
    concurrencies = sorted({concurrency for _, concurrency in values})
    axes.set_xscale("log", base=2)
    axes.set_xticks(concurrencies, [str(concurrency) for concurrency in concurrencies])
    if log:
        axes.set_yscale("log")
    if line is not None:
        axes.axhline(line, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel(label)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    return inline_svg(figure)


def _in_order(names):
    return sorted(
        set(names), key=lambda name: (backend_suffix(name), ENGINES.index(without_backend(name)))
    )


def _colour(name, names):
    families = (("sglang", _PLAIN), ("eagle3", _BUILTIN), ("sgl-", _OURS))
    prefix, colours = next(family for family in families if name.startswith(family[0]))
    family = [other for other in names if other.startswith(prefix)]
    return colours[family.index(name) % len(colours)]


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--title", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(words)
    write_text(args.out, render_page(json.loads(args.results.read_text("utf-8")), args.title))


if __name__ == "__main__":
    main()
