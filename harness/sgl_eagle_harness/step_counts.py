"""Running counts of decode steps: raw sums, of which ratios are taken last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from sgl_eagle_harness.types import BoolArray, IntArray


@dataclass(kw_only=True)
class StepCounts:
    """What decode steps did, added up.

    Attributes:
        step_ct: Steps of the whole batch.
        row_ct: Verify passes, one a request and step.
        speculated_ct: Those of them for which something was drafted.
        drafted_ct: Nodes drafted, roots excluded.
        proposed_ct: Drafts verified: nodes of the verified trees, roots and padding excluded.
        correct_ct: Drafts that the target kept.
        tier_switch_ct: Changes of requests between speculation and plain decoding.
        invalid_row_ct: Verify passes for which a draft was wanted and had no finite probability.
        host_bound_ct: Steps for which the host is known to have waited for no device.
        verify_size_ct: Verify passes by nodes verified, root included.
        depth_ct: Verify passes by levels drafted; 0 is plain decoding.
    """

    step_ct: int = 0
    row_ct: int = 0
    speculated_ct: int = 0
    drafted_ct: int = 0
    proposed_ct: int = 0
    correct_ct: int = 0
    tier_switch_ct: int = 0
    invalid_row_ct: int = 0
    host_bound_ct: int = 0
    verify_size_ct: Counter[int] = field(default_factory=Counter)
    depth_ct: Counter[int] = field(default_factory=Counter)

    @property
    def accept_token_ct(self) -> int:
        """Tokens emitted: correct drafts, and a bonus token for every verify pass."""
        return self.correct_ct + self.row_ct

    @property
    def accept_length(self) -> float | None:
        """Tokens a verify pass emitted on average, bonus token included; None without passes."""
        return self.accept_token_ct / self.row_ct if self.row_ct else None

    @property
    def accept_rate(self) -> float | None:
        """Share of proposed drafts that were kept; None where none was proposed."""
        return self.correct_ct / self.proposed_ct if self.proposed_ct else None

    def add_step(
        self,
        *,
        wanted: BoolArray,
        speculated: BoolArray,
        num_drafted: IntArray,
        num_draft_tokens: IntArray,
        depths: IntArray,
        num_correct_drafts: IntArray,
    ) -> None:
        """Count one step of B requests.

        Args:
            wanted: [B] bool, whether the policy wanted drafts.
            speculated: [B] bool, whether there was one.
            num_drafted: [B] int64, nodes drafted, root excluded.
            num_draft_tokens: [B] int64, nodes verified, root included, padding excluded.
            depths: [B] int64, levels drafted, 0 where nothing was.
            num_correct_drafts: [B] int64.
        """
        # Lists: NumPy takes longer to begin than to add up as many rows as a batch has.
        num_rows, sizes = len(speculated), num_draft_tokens.tolist()
        self.step_ct += 1
        self.row_ct += num_rows
        self.speculated_ct += speculated.tolist().count(True)
        self.invalid_row_ct += (wanted & ~speculated).tolist().count(True)
        self.drafted_ct += sum(num_drafted.tolist())
        self.proposed_ct += sum(sizes) - num_rows
        self.correct_ct += sum(num_correct_drafts.tolist())
        self.verify_size_ct.update(sizes)
        self.depth_ct.update(depths.tolist())

    def add_step_of_one_size(
        self,
        *,
        wanted: bool,
        num_drafted: int,
        num_draft_tokens: int,
        depth: int,
        num_correct_drafts: Sequence[int],
    ) -> None:
        """Count one step of B requests whose trees are of one size.

        Args:
            wanted: Whether the policy wanted drafts.
            num_drafted: Nodes drafted for each, root excluded.
            num_draft_tokens: Nodes verified of each, root included, padding excluded.
            depth: Levels drafted, 0 if nothing was.
            num_correct_drafts: B counts.
        """
        num_rows, speculated = len(num_correct_drafts), depth > 0
        self.step_ct += 1
        if not num_rows:
            return
        self.row_ct += num_rows
        self.speculated_ct += num_rows * speculated
        self.invalid_row_ct += num_rows * (wanted and not speculated)
        self.drafted_ct += num_rows * num_drafted
        self.proposed_ct += num_rows * (num_draft_tokens - 1)
        self.correct_ct += sum(num_correct_drafts)
        self.verify_size_ct[num_draft_tokens] += num_rows
        self.depth_ct[depth] += num_rows

    def copy(self) -> StepCounts:
        """The counts as they stand.

        Returns:
            An object that later steps leave alone.
        """
        return self.since(StepCounts())

    def since(self, earlier: StepCounts) -> StepCounts:
        """What was added after an earlier copy.

        Args:
            earlier: Copy of these counts.

        Returns:
            The differences.
        """
        differences: dict[str, Any] = {
            item.name: getattr(self, item.name) - getattr(earlier, item.name)
            for item in fields(self)
        }
        return StepCounts(**differences)
