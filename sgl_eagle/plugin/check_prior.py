"""Holds a prior against dense traces that it was not fitted on.

python -m sgl_eagle.plugin.check_prior TRACES... [--prior FILE]

Prints how well its map foresees which nodes are accepted, and the drafts that its average tree
expects of EAGLE-2 trees beside those that the recorded text keeps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_eagle.cli.frame.output import render_table
from sgl_eagle.plugin.builtin_policy import (
    SHIPPED_PRIOR,
    PolicyPrior,
    builtin_sizes,
    expected_drafts,
    load_prior,
)
from sgl_eagle.plugin.server_arguments import DEFAULT_LIMITS
from sgl_eagle_harness.confidence import sample_nodes
from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.reliability import Reliability, assess
from sgl_eagle_harness.round_shape import RoundShape, round_shapes
from sgl_eagle_harness.trace_store import read_dense_trace
from sgl_eagle_harness.types import TreeLimits
from sgl_eagle_tuner.replay import tokens_left
from sgl_eagle_tuner.static_grid import replay_grid


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeCheck:
    """Drafts of one shape, on average over positions.

    Attributes:
        shape: Depth and verify size of EAGLE-2 trees.
        num_positions: Positions whose text goes on for as many tokens as the tree has levels.
        expected: Correct drafts that the prior expects.
        kept: Correct drafts of the replay.
    """

    shape: RoundShape
    num_positions: int
    expected: float
    kept: float


def check_map(prior: PolicyPrior, trace: DenseTrace) -> Reliability:
    """Score a prior's map on all nodes within the default limits.

    Args:
        prior: Any.
        trace: Recorded as deep and as wide as the server's default limits.

    Returns:
        Its scores.
    """
    sample = sample_nodes(trace, DEFAULT_LIMITS)
    return assess(prior.calibration.sample_accept_probs(sample), sample.accepted)


def check_shapes(prior: PolicyPrior, trace: DenseTrace) -> Iterator[ShapeCheck]:
    """Compare the average tree with replayed ones.

    Args:
        prior: Any.
        trace: Recorded as deep and as wide as the server's default limits.

    Yields:
        Every depth with every verify size that its tree fills, shallow and small ones first.
    """
    sizes, topk = builtin_sizes(DEFAULT_LIMITS), DEFAULT_LIMITS.topk
    expected, left = expected_drafts(prior, DEFAULT_LIMITS), tokens_left(trace)
    _, *drafted = round_shapes(num_steps=DEFAULT_LIMITS.num_steps, topk=topk, sizes=sizes)
    shapes = [
        TreeLimits(num_steps=shape.num_steps, topk=topk, num_draft_tokens=shape.num_draft_tokens)
        for shape in drafted
    ]
    for limits, table in replay_grid(trace, shapes):
        whole = left > limits.num_steps
        yield ShapeCheck(
            shape=RoundShape(limits.num_steps, limits.num_draft_tokens),
            num_positions=int(whole.sum()),
            expected=float(expected[limits.num_steps - 1, sizes.index(limits.num_draft_tokens)]),
            kept=float((table.num_accept_tokens[whole] - 1).mean()),
        )


def main(arguments: Sequence[str]) -> int:
    """Print the scores.

    Args:
        arguments: Of the command line.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(prog="python -m sgl_eagle.plugin.check_prior")
    parser.add_argument("traces", type=Path, nargs="+", help="dense shards, or folders of them")
    parser.add_argument("--prior", type=Path, default=SHIPPED_PRIOR, help="default: the shipped")
    args = parser.parse_args(arguments)
    prior, trace = load_prior(args.prior), read_dense_trace(args.traces)
    scores = check_map(prior, trace)
    sys.stdout.write(
        f"{trace.num_prompts} prompts, {trace.num_positions} positions, {trace.header.draft.name}\n"
        f"map: {scores.nll:.4f} nats a node, Brier score {scores.brier:.5f}, ECE {scores.ece:.4f}, "
        f"{scores.num_nodes} nodes\n"
    )
    checks = list(check_shapes(prior, trace))
    rows = [
        [
            f"{each.shape.num_steps}/{DEFAULT_LIMITS.topk}/{each.shape.num_draft_tokens}",
            str(each.num_positions),
            f"{each.expected:.2f}",
            f"{each.kept:.2f}",
        ]
        for each in checks
    ]
    sys.stdout.write(render_table(["shape", "positions", "expected", "kept"], rows) + "\n")
    excess = sum(each.expected - each.kept for each in checks) / len(checks)
    sys.stdout.write(f"expected less kept, mean of the shapes: {excess:+.3f} drafts\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
