"""`sgl-eagle replay`: what policies would have done on recorded text, and how fast."""

from __future__ import annotations

import argparse
import logging
import time
import typing
from dataclasses import asdict, dataclass
from pathlib import Path

from sgl_eagle.cli.frame.arguments import seed_number
from sgl_eagle.cli.frame.output import render_table, write_result
from sgl_eagle.cli.trace_arguments import add_load_arguments, add_traces_argument

if typing.TYPE_CHECKING:
    from sgl_eagle_harness.dense_trace import DenseTrace
    from sgl_eagle_harness.policies.policy_file import PolicyFile
    from sgl_eagle_harness.policies.registry import PolicySpec
    from sgl_eagle_tuner.outcome import Outcome
    from sgl_eagle_tuner.session import ReplaySession
    from sgl_eagle_tuner.validation import Interval

logger = logging.getLogger(__name__)

HELP = "replay policies on dense traces: accepted tokens exactly, time from the cost table"

BENCHMARK_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sgl-eagle replay`.

    Args:
        parser: The command's parser.
    """
    add_traces_argument(parser)
    add_load_arguments(parser)
    parser.add_argument(
        "--policy",
        metavar="POLICY",
        action="append",
        required=True,
        help="policy file, or plain, eagle1, chain-STEPS, eagle2-STEPS-TOPK-TOKENS; may be given "
        "more than once",
    )
    parser.add_argument("--workload", help="replay this workload only")
    parser.add_argument(
        "--seed", type=seed_number, default=0, help="of request order and bootstrap (default: 0)"
    )
    parser.add_argument(
        "--benchmark", action="store_true", help="also time the replay itself, on one core"
    )
    parser.epilog = (
        "Speeds are predictions: steps are exact, their times come from the cost table.\n"
        "example: sgl-eagle replay traces/ --cost cost.json --policy plain --policy policy.json"
    )


def run(args: argparse.Namespace) -> int:
    """Replay every policy on every workload.

    Args:
        args: The parsed arguments.

    Returns:
        0.
    """
    from sgl_eagle_harness.cost_file import load_cost_file
    from sgl_eagle_harness.trace_store import read_dense_trace
    from sgl_eagle_tuner.prompt_split import workloads_of
    from sgl_eagle_tuner.session import ReplaySession
    from sgl_eagle_tuner.simulator import SimulationConfig
    from sgl_eagle_tuner.validation import bootstrap_tok_per_s

    costs = load_cost_file(args.cost).to_table()
    trace = read_dense_trace(args.traces, args.workload)
    policies = [_load_policy(name, trace) for name in args.policy]
    load = None
    if args.batch_size > 1:
        load = SimulationConfig(max_running=args.batch_size, seed=args.seed)
    rows: list[ReplayRow] = []
    for workload in workloads_of(trace):
        session = ReplaySession(trace.select(workload=workload), costs, load)
        for name, policy in zip(args.policy, policies, strict=True):
            spec = _spec_for(policy, workload)
            outcome = session.outcome(spec)
            rows.append(
                ReplayRow(
                    workload=workload,
                    policy=name,
                    tok_per_s=bootstrap_tok_per_s(outcome.totals, seed=args.seed),
                    us_per_token=outcome.us_per_token,
                    num_tokens=int(outcome.totals.num_tokens.sum()),
                    num_prompts=len(outcome.totals.prompt_ids),
                    expected_accept_length=(
                        session.run(spec).expected_accept_length if load is None else None
                    ),
                    outcome=outcome,
                    positions_per_s=_positions_per_s(session, spec) if args.benchmark else None,
                )
            )
    _warn_of_uncovered(rows)
    write_result(
        [row.fields() for row in rows],
        text=_describe(rows, benchmark=args.benchmark),
        output_format=args.format,
    )
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRow:
    """One policy on one workload.

    Attributes:
        workload: Its name.
        policy: As named on the command line.
        tok_per_s: Predicted tokens per second, interval over prompts.
        us_per_token: Predicted microseconds per emitted token.
        num_tokens: Tokens emitted.
        num_prompts: Prompts replayed.
        expected_accept_length: Mean over the target's draws, for sampled text at batch size 1.
        outcome: Everything else.
        positions_per_s: Speed of the replay itself, if it was asked for.
    """

    workload: str
    policy: str
    tok_per_s: Interval
    us_per_token: float
    num_tokens: int
    num_prompts: int
    expected_accept_length: float | None
    outcome: Outcome
    positions_per_s: float | None

    def fields(self) -> dict[str, object]:
        """The row as JSON has it: without sums per prompt.

        Returns:
            Field name to value.
        """
        named = asdict(self)
        outcome = named.pop("outcome")
        outcome.pop("totals")
        return {**named, **outcome}


def _warn_of_uncovered(rows: list[ReplayRow]) -> None:
    for row in rows:
        if row.outcome.uncovered_share > 0:
            logger.warning(
                "%s: in %.1f %% of the steps of %s it would draft more than was recorded, so that "
                "its accept length and speed are too low; record with more --num-steps or --beams",
                row.policy,
                100 * row.outcome.uncovered_share,
                row.workload,
            )


def _describe(rows: list[ReplayRow], *, benchmark: bool) -> str:
    headers = ["workload", "policy", "tok/s", "us/token", "accept length", "tokens verified"]
    headers += ["uncovered", *(["positions/s"] if benchmark else [])]
    cells = [
        [
            row.workload,
            row.policy,
            f"{row.tok_per_s.value:.1f} ({row.tok_per_s.low:.1f} to {row.tok_per_s.high:.1f})",
            f"{row.us_per_token:.0f}",
            f"{row.outcome.accept_length:.2f}",
            f"{row.outcome.mean_num_draft_tokens:.1f}",
            f"{row.outcome.uncovered_share:.2%}",
            *([f"{row.positions_per_s:,.0f}"] if row.positions_per_s is not None else []),
        ]
        for row in rows
    ]
    return render_table(headers, cells)


def _load_policy(name: str, trace: DenseTrace) -> PolicySpec | PolicyFile:
    from sgl_eagle_harness.errors import PolicyConfigError, TreeLimitsError
    from sgl_eagle_harness.policies.policy_file import load_policy_file
    from sgl_eagle_tuner.policy_names import NAME_FORMS, named_policy

    try:
        spec = named_policy(name)
        if spec is not None:
            spec.build(None)
            return spec
    except (PolicyConfigError, TreeLimitsError) as error:
        raise PolicyConfigError(f"--policy {name}: {error}") from error
    path = Path(name)
    if not path.exists():
        raise PolicyConfigError(f"--policy must be a file, {NAME_FORMS}; got {name!r}")
    record = load_policy_file(path)
    for model in ("target", "draft"):
        tuned_for, recorded = getattr(record.provenance, model), getattr(trace.header, model)
        if tuned_for.sha256 != recorded.sha256:
            raise PolicyConfigError(
                f"{path}: tuned for the {model} {tuned_for.name} ({tuned_for.sha256[:12]}), but "
                f"the trace was recorded with {recorded.name} ({recorded.sha256[:12]})"
            )
    return record


def _spec_for(policy: PolicySpec | PolicyFile, workload: str) -> PolicySpec:
    from sgl_eagle_harness.policies.policy_file import PolicyFile

    if isinstance(policy, PolicyFile):
        return policy.workloads.get(workload, policy.default)
    return policy


def _positions_per_s(session: ReplaySession, spec: PolicySpec) -> float:
    from sgl_eagle_tuner.replay import replay_positions

    policy = spec.build(session.costs)
    started = time.perf_counter()
    num_positions = 0
    while (elapsed := time.perf_counter() - started) < BENCHMARK_SECONDS:
        replay_positions(session.trace, policy)
        num_positions += session.trace.num_positions
    return num_positions / elapsed
