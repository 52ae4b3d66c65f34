"""How to search; apart from the search itself, so that a command's help need not load Optuna."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_eagle_harness.errors import PolicyConfigError


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """How to search.

    Attributes:
        num_trials: Settings to try per workload, baselines included.
        seed: Of the sampler. A search is repeatable with one worker only.
        uncovered_limit: Share of steps whose tree the trace does not fully hold above which a
            setting is infeasible: its replay would understate what the engine drafts.
        num_finalists: Trials to rescore on held-out prompts.
        storage: Optuna storage URL for resuming, or for many workers; None keeps all in memory.
    """

    num_trials: int = 200
    seed: int = 0
    uncovered_limit: float = 0.02
    num_finalists: int = 3
    storage: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_trials", "num_finalists"):
            if getattr(self, name) < 1:
                raise PolicyConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.uncovered_limit < 1:
            raise PolicyConfigError(
                f"uncovered_limit must be in [0, 1), got {self.uncovered_limit}"
            )
