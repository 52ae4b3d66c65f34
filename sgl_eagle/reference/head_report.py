"""Scores of heads as JSON and as one HTML page."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from sgl_eagle.reference.head_checkpoint import FactorsInfo
from sgl_eagle.reference.head_evaluate import HeadScore
from sgl_eagle_harness.atomic_file import write_text
from sgl_eagle_kernels.bench.svg import inline_svg
from sgl_eagle_tuner.provenance import RunProvenance

_FAMILIES = (
    "int8", "full head", "low rank alone", "natural order", "local", "clusters", "most frequent",
    "global",
)  # fmt: skip
"""Words of a route's name by which the figure colours it: the first that occurs."""

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap }
th { border-bottom: 2px solid #888; white-space: normal }
td:first-child, th:first-child { text-align: left }
tr:nth-child(even) { background: #8881 } svg { max-width: 100%; height: auto }
</style>
<h1>{{ title }}</h1>
<p>{{ setting }}</p>
<p>Every route proposes from the same states of the same draft along held-out text that the target
wrote. Accept length counts chains of most probable drafts, bonus token included. Log-probability
and probability errors are mean absolute errors of a route's own best token against the full head
in float32; the full head's own error is the rounding of its logits. ECE is the calibration error
of path confidence along those chains.</p>
{{ figure | safe }}
<table><tr>{% for head in heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
</html>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadQuality:
    """One evaluation, with all that its numbers depend on.

    Attributes:
        provenance: Command, commit, versions and machine.
        target: Name of the target.
        draft: Name of the draft.
        draft_sha256: Digest of its files.
        device: Where both ran.
        dtype: In which type.
        num_prompts: Held-out prompts answered.
        max_new_tokens: Length of an answer at most.
        num_steps: Draft steps of a chain.
        num_rows: Rows scored, over all steps.
        topk: K of the recall.
        factors: Where the factors come from, file by file.
        scores: The full head first.
    """

    provenance: RunProvenance
    target: str
    draft: str
    draft_sha256: str
    device: str
    dtype: str
    num_prompts: int
    max_new_tokens: int
    num_steps: int
    num_rows: int
    topk: int
    factors: list[FactorsInfo]
    scores: list[HeadScore]


def score_headers(topk: int) -> list[str]:
    """Titles of the columns of `score_cells`.

    Args:
        topk: K of the recall.

    Returns:
        One for each cell.
    """
    headers = ["route", "factors", "rank", "candidates", "MB read", "accept length", "recall@1"]
    headers += [f"recall@{topk}", "expected", "same top-1", "log-prob error", "prob error"]
    return [*headers, "ECE"]


def score_cells(score: HeadScore) -> list[str]:
    """One score as text.

    Args:
        score: Any.

    Returns:
        Cells; what does not apply is empty.
    """
    expected = score.expected_recall_topk
    return [
        score.route,
        score.method or "",
        "" if score.rank is None else str(score.rank),
        str(score.num_candidates),
        f"{score.read_mb:.1f}",
        f"{score.accept_length:.3f}",
        f"{score.recall_top1:.4f}",
        f"{score.recall_topk:.4f}",
        "" if expected is None else f"{expected:.4f}",
        f"{score.agreement_top1:.4f}",
        f"{score.log_prob_error:.4f}",
        f"{score.prob_error:.4f}",
        f"{score.path_ece:.4f}",
    ]


def write_head_report(path: Path, quality: HeadQuality) -> list[Path]:
    """Write the page and, beside it, its numbers.

    Args:
        path: The page, ending in ".html".
        quality: What it shows.

    Returns:
        The files.

    Raises:
        OutputError: If one cannot be written.
    """
    numbers = path.with_suffix(".json")
    record = {
        **asdict(quality),
        "provenance": quality.provenance.model_dump(mode="json"),
        "factors": [info.model_dump(mode="json") for info in quality.factors],
    }
    write_text(numbers, json.dumps(record, indent=1) + "\n")
    write_text(path, render_head_report(quality))
    return [path, numbers]


def render_head_report(quality: HeadQuality) -> str:
    """The page.

    Args:
        quality: What it shows.

    Returns:
        HTML that needs no other file.
    """
    made = quality.provenance
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    factors = "; ".join(f"{info.method}, fitted to {info.text}" for info in quality.factors)
    setting = (
        f"{quality.target} with {quality.draft} (sha256 {quality.draft_sha256[:12]}), "
        f"{quality.dtype} on {quality.device}; {quality.num_prompts} held-out prompts, at most "
        f"{quality.max_new_tokens} tokens each, {quality.num_rows} rows at {quality.num_steps} "
        f"draft steps. Factors: {factors}. "
        f"{made.created:%Y-%m-%d}, commit {made.commit or 'not recorded'}, {versions}. "
        f"Command: {made.command}"
    )
    template = jinja2.Environment(autoescape=True).from_string(_PAGE)
    return template.render(
        title="What cheaper LM heads lose",
        setting=setting,
        figure=draw_scores(quality.scores),
        heads=score_headers(quality.topk),
        rows=[score_cells(score) for score in quality.scores],
    )


def draw_scores(scores: list[HeadScore]) -> str:
    """Accept length against bytes read.

    Args:
        scores: The full head first.

    Returns:
        SVG.
    """
    figure = Figure(figsize=(9, 5))
    axes = figure.subplots()
    families: dict[str, list[HeadScore]] = {}
    for score in scores:
        families.setdefault(_family(score), []).append(score)
    for name, members in families.items():
        axes.semilogx(
            [score.read_mb for score in members],
            [score.accept_length for score in members],
            "o",
            label=name,
        )
    axes.axhline(scores[0].accept_length, color="gray", linewidth=0.8)
    axes.set_xlabel("weights read for one row, MB")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set_ylabel("accept length")
    axes.legend()
    return inline_svg(figure)


def _family(score: HeadScore) -> str:
    return next(family for family in _FAMILIES if family in score.route)
