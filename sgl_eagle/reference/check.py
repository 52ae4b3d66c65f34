"""What would silently fail with a draft and its target: from its files to a smoke run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_eagle.reference.check_config import check_against_target, check_keys, check_tree
from sgl_eagle.reference.check_row import CheckRow, failed, ok
from sgl_eagle.reference.check_run import judge_smoke, run_smoke
from sgl_eagle.reference.check_weights import check_head, check_storage, check_values
from sgl_eagle.reference.draft_checkpoint import read_tensors
from sgl_eagle.reference.draft_config import DraftConfig, load_draft_config
from sgl_eagle.reference.head_checkpoint import LmHead, describe_head
from sgl_eagle.reference.loading import LoadedTarget, load_target
from sgl_eagle.reference.measure import encode_prompts
from sgl_eagle.reference.pair import DTYPES, DraftWeights, Pair, join_pair
from sgl_eagle.reference.prompts import Prompt
from sgl_eagle_harness.errors import CheckpointError
from sgl_eagle_harness.types import TreeLimits


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """How to check.

    Attributes:
        limits: Trees of the smoke run.
        max_new_tokens: Completion length of the smoke run at most.
        dtype: One of `DTYPES`.
        device: Torch device.
        lm_head: Head that the draft proposes with; None takes the two-stage head where it has one.
        draft_weights: None takes int8 where it is faster.
    """

    limits: TreeLimits
    max_new_tokens: int = 32
    dtype: str = "bfloat16"
    device: str = "cpu"
    lm_head: LmHead | None = None
    draft_weights: DraftWeights | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCheck:
    """What was found.

    Attributes:
        draft: Folder of the draft.
        target: Name or folder of the target.
        rows: One for each check, in order.
    """

    draft: Path
    target: str
    rows: tuple[CheckRow, ...]

    @property
    def passed(self) -> bool:
        """Nothing failed; warnings may stand."""
        return all(row.outcome != "failed" for row in self.rows)


def check_draft(
    draft: Path,
    target: str,
    prompts: Sequence[Prompt],
    config: CheckConfig,
    *,
    on_run: Callable[[], None],
) -> DraftCheck:
    """Check a draft alone, against its target, and in a smoke run.

    A check that fails does not end the others unless they need what it could not read.

    Args:
        draft: Folder of an EAGLE checkpoint.
        target: `smollm2` or a folder in Hugging Face format.
        prompts: For the smoke run.
        config: How to check.
        on_run: Called after each of the smoke run's `NUM_RUNS * len(prompts)` decodes.

    Returns:
        All findings.
    """
    inspection = _Inspection(draft, config)
    parsed = inspection.read_config()
    inspection.read_weights()
    loaded = inspection.load_target(target)
    pair = None
    if parsed is not None and loaded is not None:
        inspection.rows += check_against_target(parsed, draft, loaded)
        pair = inspection.join_pair(loaded)
    if pair is not None and config.limits.topk <= pair.draft.config.draft_vocab_size:
        inspection.run_smoke(pair, prompts, on_run)
    else:
        inspection.rows.append(
            CheckRow(
                name="smoke run",
                outcome="not checked",
                found="nothing can be drafted before the failures above are repaired",
            )
        )
    return DraftCheck(draft=draft, target=target, rows=tuple(inspection.rows))


class _Inspection:
    """Collects rows; what a later check needs is returned, None where it could not be had."""

    def __init__(self, draft: Path, config: CheckConfig) -> None:
        self.draft = draft
        self.config = config
        self.rows: list[CheckRow] = []

    def read_config(self) -> DraftConfig | None:
        try:
            parsed = load_draft_config(self.draft)
        except CheckpointError as error:
            self.rows.append(failed("config", str(error), "give the folder of an EAGLE checkpoint"))
            return None
        self.rows += [
            ok(
                "config",
                f"{parsed.kind}, hidden size {parsed.hidden_size}, "
                f"{parsed.num_attention_heads} heads, MLP of {parsed.intermediate_size}",
            ),
            check_keys(self.draft),
            check_tree(self.config.limits, parsed.draft_vocab_size),
        ]
        return parsed

    def read_weights(self) -> None:
        try:
            tensors = read_tensors(self.draft)
        except CheckpointError as error:
            self.rows.append(failed("weights file", str(error), "copy the checkpoint again"))
            return
        dtype = DTYPES[self.config.dtype]
        self.rows += [
            check_storage(tensors, dtype),
            check_values(tensors, dtype),
            check_head(tensors),
        ]

    def load_target(self, target: str) -> LoadedTarget | None:
        try:
            loaded = load_target(target, dtype=DTYPES[self.config.dtype], device=self.config.device)
        except CheckpointError as error:
            self.rows.append(
                failed("target", str(error), "give --target the model that the draft is for")
            )
            return None
        self.rows.append(ok("target", f"{loaded.name}, {loaded.model.config.model_type}"))
        return loaded

    def join_pair(self, loaded: LoadedTarget) -> Pair | None:
        try:
            pair = join_pair(
                loaded,
                self.draft,
                dtype=self.config.dtype,
                lm_head=self.config.lm_head,
                draft_weights=self.config.draft_weights,
            )
        except CheckpointError as error:
            self.rows.append(
                failed("weights", str(error), "use the draft's own target, or export it again")
            )
            return None
        num_parameters = sum(parameter.numel() for parameter in pair.draft.parameters())
        self.rows.append(
            ok(
                "weights",
                f"{num_parameters / 1e6:.2f} M parameters, no tensor missing or unexpected; "
                f"proposes with the {describe_head(pair.draft.two_stage_head)}",
            )
        )
        return pair

    def run_smoke(self, pair: Pair, prompts: Sequence[Prompt], on_run: Callable[[], None]) -> None:
        length = self.config.max_new_tokens
        encoded = encode_prompts(pair, prompts, max_new_tokens=length)
        run = run_smoke(pair, encoded, self.config.limits, max_new_tokens=length, on_run=on_run)
        self.rows += judge_smoke(run)
