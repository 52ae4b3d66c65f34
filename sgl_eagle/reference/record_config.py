"""What to record; apart from the recording, so that help need not load torch."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_eagle.reference.sampling_config import GREEDY, Sampling
from sgl_eagle_harness.errors import TreeLimitsError
from sgl_eagle_harness.types import MAX_STEPS, MAX_TOPK


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """What to record.

    Attributes:
        num_steps: Draft steps at every position.
        beams: Beam widths of the search space; the widest is the number of children stored.
        max_new_tokens: Completion length at most.
        rows: Prompts decoded together.
        sampling: How the target chooses its text.
    """

    num_steps: int = 6
    beams: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    max_new_tokens: int = 128
    rows: int = 8
    sampling: Sampling = GREEDY

    def __post_init__(self) -> None:
        if not 1 <= self.num_steps <= MAX_STEPS:
            raise TreeLimitsError(
                f"num_steps must be in [1, {MAX_STEPS}], got num_steps={self.num_steps}"
            )
        beams = list(self.beams)
        if not beams or beams != sorted(set(beams)) or beams[0] < 1 or beams[-1] > MAX_TOPK:
            raise TreeLimitsError(
                f"beams must be distinct, ascending and in [1, {MAX_TOPK}], got beams={beams}"
            )
