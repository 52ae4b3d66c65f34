"""How much the demo does; apart from the demo itself, so that help need not load torch."""

from __future__ import annotations

from dataclasses import dataclass

TRACES_FOLDER = "traces"
COST_FILE = "cost.json"
POLICY_FILE = "policy.json"
TUNE_FILE = "tune.json"
PAGE_FILE = "report.html"


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """How much the demo does.

    Attributes:
        num_tune_prompts: Prompts of each workload to record and tune on.
        num_held_out_prompts: Prompts of each workload to run the engine on.
        max_new_tokens: Completion length at most.
        num_trials: Settings to search for each workload.
        seed: Of search and bootstrap.
        num_steps: Draft steps recorded, the deepest that can be tuned.
        beams: Values of topk recorded.
        rows: Prompts decoded together while recording.
        profile_repeats: Measurements behind each cost.
        num_repeats: Runs of each policy on each held-out prompt; the median counts.
        num_drawn_trees: Steps to draw, of as many workloads.
    """

    num_tune_prompts: int = 10
    num_held_out_prompts: int = 8
    max_new_tokens: int = 72
    num_trials: int = 200
    seed: int = 0
    num_steps: int = 6
    beams: tuple[int, ...] = (1, 2, 4, 8)
    rows: int = 12
    profile_repeats: int = 7
    num_repeats: int = 1
    num_drawn_trees: int = 3
