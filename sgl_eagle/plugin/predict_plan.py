"""Predicts what a server without a policy file chooses, from a cost table and a serving report.

python -m sgl_eagle.plugin.predict_plan --cost COST --serving REPORT [--limits STEPS TOPK TOKENS]

The cost table says how much faster than plain decoding a round is; what plain decoding reaches is
taken from the report, since a table leaves out what the scheduler does between rounds, and an older
one holds rounds that nothing overlaps with. A table that tells what the host launches says with the
report how long the scheduler takes. The report's accept lengths are those that the server would
learn. With --times it holds the table's rounds against served ones instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from sgl_eagle.cli.frame.output import render_table
from sgl_eagle.plugin.builtin_policy import builtin_plan, load_prior
from sgl_eagle.plugin.server_arguments import DEFAULT_LIMITS
from sgl_eagle_harness.cost_file import load_cost_file
from sgl_eagle_harness.cost_table import CostTable
from sgl_eagle_harness.policies.plan import PlanPolicy, asking_gain
from sgl_eagle_harness.round_shape import PLAIN_ROUND, RoundShape
from sgl_eagle_harness.scheduler_time import round_us
from sgl_eagle_harness.shape_estimates import SAME_LEVEL
from sgl_eagle_harness.types import FloatArray, TreeLimits

PLAIN_ENGINES, DRAFTING_ENGINE = ("sgl-plain", "sglang"), "sgl-eagle2"
"""Plain rounds are those of the first engine that a report has."""
DRAFTING_SHAPE = RoundShape(5, 8)
"""What the report's EAGLE-2 engine drafts and verifies."""
TYPICAL_CONTEXT = 230
"""Prompts of 106 tokens on average, and half of 256 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the server would do with so many requests.

    Attributes:
        concurrency: Requests.
        first: Shape of the first round.
        learnt: Shape once the report's accept length is known.
        accept_length: Tokens that such a round is expected to emit for a request.
        tok_per_s: Predicted tokens per second.
        plain_tok_per_s: Measured tokens per second of plain rounds.
    """

    concurrency: int
    first: RoundShape
    learnt: RoundShape
    accept_length: float
    tok_per_s: float
    plain_tok_per_s: float


def predict(
    costs: CostTable,
    timing: list[dict[str, Any]],
    limits: TreeLimits,
    *,
    drafting_engine: str = DRAFTING_ENGINE,
) -> Iterator[Prediction]:
    """Predict every concurrency of a report.

    Args:
        costs: Measured on the same setup.
        timing: Rows of the report.
        limits: The server's.
        drafting_engine: The report's EAGLE-2 engine.

    Yields:
        Predictions, concurrency ascending.
    """
    plan = builtin_plan(limits, costs, load_prior())
    plain_engine = _plain_engine(timing)
    for concurrency in sorted({row["concurrency"] for row in timing}):
        plain = _mean(timing, plain_engine, concurrency, "full_tok_per_s")
        drafts = _mean(timing, drafting_engine, concurrency, "tokens_per_verify") - 1
        tokens = _with_drafts(plan, drafts).shape_tokens
        speed = tokens / modelled_us(plan, concurrency, served_plain_us=1e6 * concurrency / plain)
        best = int(speed.argmax())
        start = plan.shape_tok_per_us(concurrency, TYPICAL_CONTEXT)
        yield Prediction(
            concurrency=concurrency,
            first=plan.shapes[int(start.argmax())],
            learnt=plan.shapes[best],
            accept_length=float(tokens[best]),
            tok_per_s=plain * float(speed[best] / speed[0]),
            plain_tok_per_s=plain,
        )


def modelled_us(plan: PlanPolicy, concurrency: int, *, served_plain_us: float) -> FloatArray:
    """Time of a round of every shape, the scheduler's included where plain rounds tell it.

    Args:
        plan: At measured costs.
        concurrency: Requests.
        served_plain_us: What a plain round took while serving.

    Returns:
        [J] float64 microseconds; rows of rounds where these are as long as served ones, or the
        table does not tell what the host launches.
    """
    row_us = plan.shape_us(concurrency, TYPICAL_CONTEXT)
    if plan.costs.launch is None or served_plain_us <= SAME_LEVEL * row_us[0]:
        return row_us
    launch_us = plan.shape_launch_us(concurrency, TYPICAL_CONTEXT)
    return round_us(row_us, launch_us, max(0.0, served_plain_us - float(launch_us[0])))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRound:
    """How long a round takes by the table, and took while serving.

    Attributes:
        concurrency: Requests.
        shape: Of the round.
        table_us: By the table; of a plain round, with its share of keeping the draft up to date.
        served_us: By the report: tokens of a round over tokens per microsecond.
    """

    concurrency: int
    shape: RoundShape
    table_us: float
    served_us: float


def served_rounds(
    costs: CostTable,
    timing: list[dict[str, Any]],
    limits: TreeLimits,
    *,
    drafting_engine: str = DRAFTING_ENGINE,
) -> Iterator[ServedRound]:
    """Compare the table with rounds of the report's plain and EAGLE-2 engines.

    Args:
        costs: Measured on the same setup.
        timing: Rows of the report.
        limits: The server's.
        drafting_engine: The report's EAGLE-2 engine.

    Yields:
        Both shapes at every concurrency, ascending.
    """
    plan = builtin_plan(limits, costs, load_prior())
    for concurrency in sorted({row["concurrency"] for row in timing}):
        table_us = dict(zip(plan.shapes, plan.shape_us(concurrency, TYPICAL_CONTEXT), strict=True))
        for engine, shape in (
            (_plain_engine(timing), PLAIN_ROUND),
            (drafting_engine, DRAFTING_SHAPE),
        ):
            tokens = concurrency * _mean(timing, engine, concurrency, "tokens_per_verify")
            yield ServedRound(
                concurrency=concurrency,
                shape=shape,
                table_us=float(table_us[shape]),
                served_us=1e6 * tokens / _mean(timing, engine, concurrency, "full_tok_per_s"),
            )


def extends_in_graphs(costs: CostTable) -> CostTable:
    """A table whose draft-extends of every size take as long as those of the largest.

    Args:
        costs: Measured where only the largest ran in graphs.

    Returns:
        An upper bound of what the others take in graphs.
    """
    us = costs.draft_extend.us.copy()
    us[:, 1:] = us[:, -1:]
    return replace(costs, draft_extend=replace(costs.draft_extend, us=us))


def _with_drafts(plan: PlanPolicy, drafts: float) -> PlanPolicy:
    # The whole average tree is off as the shape that was run.
    prior = np.array(plan.expected_drafts)
    column = plan.verify_sizes.index(DRAFTING_SHAPE.num_draft_tokens)
    scaled = prior * (drafts / prior[DRAFTING_SHAPE.num_steps - 1, column])
    most = np.minimum(np.arange(1, plan.num_steps + 1)[:, None], np.array(plan.verify_sizes) - 1)
    expected = tuple(map(tuple, np.minimum(scaled, most).tolist()))
    return replace(plan, expected_drafts=expected)


def _plain_engine(timing: list[dict[str, Any]]) -> str:
    engines = {row["engine"] for row in timing}
    return next(engine for engine in PLAIN_ENGINES if engine in engines)


def _mean(timing: list[dict[str, Any]], engine: str, concurrency: int, name: str) -> float:
    found = [
        float(row[name])
        for row in timing
        if (row["engine"], row["concurrency"]) == (engine, concurrency) and row[name] is not None
    ]
    return mean(found)


def _name(shape: RoundShape, topk: int) -> str:
    if not shape.num_steps:
        return "plain"
    return f"{shape.num_steps}/{topk}/{shape.num_draft_tokens}"


def _describe_times(rounds: Iterable[ServedRound], topk: int) -> str:
    headers = ["concurrency", "round", "table ms", "served ms", "table / served"]
    rows = [
        [
            str(each.concurrency),
            _name(each.shape, topk),
            f"{each.table_us / 1e3:.2f}",
            f"{each.served_us / 1e3:.2f}",
            f"{each.table_us / each.served_us:.2f}",
        ]
        for each in rounds
    ]
    return render_table(headers, rows)


def main(arguments: list[str]) -> int:
    """Print the predictions, or the times.

    Args:
        arguments: Of the command line.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(prog="python -m sgl_eagle.plugin.predict_plan")
    parser.add_argument("--cost", type=Path, required=True, help="cost table of a server")
    parser.add_argument("--serving", type=Path, required=True, help="JSON of a serving report")
    parser.add_argument(
        "--extends-in-graphs",
        action="store_true",
        help="let draft-extend of every size take as long as that of the largest",
    )
    parser.add_argument(
        "--limits",
        nargs=3,
        type=int,
        metavar=("STEPS", "TOPK", "TOKENS"),
        default=(DEFAULT_LIMITS.num_steps, DEFAULT_LIMITS.topk, DEFAULT_LIMITS.num_draft_tokens),
        help="of the server (default: %(default)s, as where its three flags are left out)",
    )
    parser.add_argument(
        "--drafting",
        metavar="ENGINE",
        default=DRAFTING_ENGINE,
        help="of the report, drafts EAGLE-2 trees of 5, 4, 8 (default: %(default)s)",
    )
    parser.add_argument(
        "--times", action="store_true", help="print how long rounds take by the table and served"
    )
    args = parser.parse_args(arguments)
    num_steps, topk, num_draft_tokens = args.limits
    limits = TreeLimits(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)
    costs = load_cost_file(args.cost).to_table()
    if args.extends_in_graphs:
        costs = extends_in_graphs(costs)
    timing = json.loads(args.serving.read_text())["timing"]
    if args.times:
        sys.stdout.write(
            _describe_times(
                served_rounds(costs, timing, limits, drafting_engine=args.drafting), topk
            )
            + "\n"
        )
        return 0
    rows = [
        [
            str(each.concurrency),
            _name(each.first, topk),
            _name(each.learnt, topk),
            f"{each.accept_length:.2f}",
            f"{each.tok_per_s:.0f}",
            f"{each.tok_per_s / each.plain_tok_per_s:.2f}",
        ]
        for each in predict(costs, timing, limits, drafting_engine=args.drafting)
    ]
    headers = ["concurrency", "first round", "once learnt", "accept length", "tok/s", "of plain"]
    sys.stdout.write(render_table(headers, rows) + "\n")
    gain = asking_gain(
        builtin_plan(limits, costs, load_prior()), batch_size=1, context_len=TYPICAL_CONTEXT
    )
    sys.stdout.write(f"asking after every level, one request: {gain:+.1%} of the plan's tok/s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
