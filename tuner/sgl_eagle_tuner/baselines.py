"""What a tuned policy must beat: plain decoding, the usual setting, the best static setting."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_eagle_harness.errors import PolicyConfigError
from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.plain import PlainSpec
from sgl_eagle_harness.policies.registry import PolicySpec
from sgl_eagle_harness.types import TreeLimits
from sgl_eagle_tuner.outcome import Outcome
from sgl_eagle_tuner.report.speed import SettingRole
from sgl_eagle_tuner.session import ReplaySession
from sgl_eagle_tuner.static_grid import grid_limits

USUAL_LIMITS = TreeLimits(num_steps=5, topk=4, num_draft_tokens=8)
"""EAGLE-3's setting in most launch commands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A policy and what it did on the tuning prompts.

    Attributes:
        role: Why it is considered.
        label: Name for people.
        spec: The policy.
        outcome: On the tuning prompts.
    """

    role: SettingRole
    label: str
    spec: PolicySpec
    outcome: Outcome


def eagle2_spec(limits: TreeLimits) -> Eagle2Spec:
    """Stored form of EAGLE-2/3 with some limits.

    Args:
        limits: Depth, branching and verified tokens.

    Returns:
        The spec.
    """
    return Eagle2Spec(
        num_steps=limits.num_steps, topk=limits.topk, num_draft_tokens=limits.num_draft_tokens
    )


def replay_baselines(session: ReplaySession, *, uncovered_limit: float) -> list[Candidate]:
    """Score all baselines on the tuning prompts.

    Args:
        session: Tuning prompts.
        uncovered_limit: Share of steps beyond the recorded trees that is tolerated.

    Returns:
        Plain decoding, the usual setting if trace and costs cover it, the best of the grid.

    Raises:
        PolicyConfigError: If trace and cost table have no static setting in common.
    """
    found = [_candidate("plain", "plain", PlainSpec(), session)]
    settings = grid_limits(session.trace.header, session.costs)
    if USUAL_LIMITS in settings:
        found.append(_candidate("usual", "usual 5/4/8", eagle2_spec(USUAL_LIMITS), session))
    scored = [
        (limits, outcome)
        for limits, outcome in session.grid_outcomes(settings)
        if outcome.uncovered_share <= uncovered_limit
    ]
    if not scored:
        raise PolicyConfigError(
            f"none of {len(settings)} static settings is covered by the trace (beams "
            f"{list(session.trace.header.beams)}, num_steps {session.trace.header.num_steps}) on "
            f"all but {uncovered_limit:.1%} of steps"
        )
    best, outcome = min(scored, key=lambda point: point[1].us_per_token)
    found.append(
        Candidate(role="best_static", label="best static", spec=eagle2_spec(best), outcome=outcome)
    )
    return found


def _candidate(
    role: SettingRole, label: str, spec: PolicySpec, session: ReplaySession
) -> Candidate:
    return Candidate(role=role, label=label, spec=spec, outcome=session.outcome(spec))
