"""A recording session: prompts in, dense shards out, nothing finished is ever lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from sgl_eagle.reference.measure import encode_prompts
from sgl_eagle.reference.pair import Pair
from sgl_eagle.reference.prompts import Prompt
from sgl_eagle.reference.record import RecordedText, decode_texts, record_text
from sgl_eagle.reference.record_config import RecordConfig
from sgl_eagle_harness.dense_trace import PromptTrace
from sgl_eagle_harness.errors import OutputError
from sgl_eagle_harness.output_folder import sole_writer
from sgl_eagle_harness.policies.recording import RecordingPolicy
from sgl_eagle_harness.trace_schema import PromptSource, SamplingParams, TraceHeader
from sgl_eagle_harness.trace_store import SHARD_SUFFIX, write_dense_shard

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSummary:
    """What a session wrote.

    Attributes:
        shards: Files, in order.
        num_prompts: Prompts recorded.
        num_positions: Positions recorded.
    """

    shards: tuple[Path, ...]
    num_prompts: int
    num_positions: int


def record_prompts(
    pair: Pair,
    prompts: Sequence[Prompt],
    out: Path,
    config: RecordConfig,
    *,
    source: PromptSource,
    on_tokens: Callable[[int], None],
    commit: str | None = None,
) -> RecordSummary:
    """Decode every prompt and record the draft at each of its positions.

    Prompts of one workload are decoded in groups, and every group becomes one shard. Whatever ends
    the session early, the prompts of the current group that are finished are still written.

    Args:
        pair: Target and draft.
        prompts: At least one.
        out: Folder for the shards; must not hold any yet.
        config: What to record.
        source: Where the prompts came from.
        on_tokens: Called with the number of tokens decoded or positions drafted since.
        commit: Source revision for the header.

    Returns:
        What was written.

    Raises:
        BaseException: Any, an interrupt included, after the finished prompts have been written.
        OutputError: If the folder holds shards already, or cannot be written.
    """
    with sole_writer(out):
        if any(out.glob(f"*{SHARD_SUFFIX}")):
            raise OutputError(
                f"{out} holds a recording already: choose another folder or remove it"
            )
        return _record(pair, prompts, out, config, source, on_tokens, commit)


def _record(
    pair: Pair,
    prompts: Sequence[Prompt],
    out: Path,
    config: RecordConfig,
    source: PromptSource,
    on_tokens: Callable[[int], None],
    commit: str | None,
) -> RecordSummary:
    encoded = {
        prompt.id: prompt.tokens
        for prompt in encode_prompts(pair, prompts, max_new_tokens=config.max_new_tokens)
    }
    header = trace_header(pair, config, source=source, commit=commit)
    policy = RecordingPolicy(num_steps=config.num_steps, beams=config.beams)
    shards: list[Path] = []
    num_kept = num_positions = 0
    for index, group in enumerate(_groups(prompts, config.rows)):
        path = out / f"{group[0].workload}-{index:05d}{SHARD_SUFFIX}"
        finished: list[PromptTrace] = []
        try:
            tokens = [encoded[prompt.id] for prompt in group]
            for text in _decode_group(pair, group, tokens, config, on_tokens):
                finished.append(
                    record_text(
                        pair.target, pair.draft, text, policy=policy, sampling=config.sampling
                    )
                )
                on_tokens(len(text.completion))
            write_dense_shard(path, header, finished)
        except BaseException:
            if finished:  # written again if an interrupt fell into the writing itself
                write_dense_shard(path, header, finished)
            num_kept += len(finished)
            logger.warning("stopped early: %s holds the %d prompts that were done", out, num_kept)
            raise
        num_kept += len(finished)
        shards.append(path)
        num_positions += sum(len(trace.next_token) for trace in finished)
    return RecordSummary(
        shards=tuple(shards), num_prompts=len(prompts), num_positions=num_positions
    )


def trace_header(
    pair: Pair, config: RecordConfig, *, source: PromptSource, commit: str | None
) -> TraceHeader:
    """Provenance of a recording.

    Args:
        pair: Target and draft.
        config: What is recorded.
        source: Where the prompts came from.
        commit: Source revision, if known.

    Returns:
        The header of every shard.
    """
    sampling = config.sampling
    greedy = sampling.temperature == 0.0
    return TraceHeader(
        kind="dense",
        target=pair.target_identity,
        draft=pair.draft_identity,
        engine="reference",
        versions={name: version(name) for name in ("torch", "transformers", "numpy")},
        head_kind=pair.draft.config.kind,
        vocab_size=pair.target.dims.vocab_size,
        num_steps=config.num_steps,
        topk=config.beams[-1],
        beams=config.beams,
        dtype=pair.dtype,
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=None if greedy else sampling.seed,
        ),
        prompts=source,
        forced_continuation=False,
        censored=False,
        created=datetime.now(UTC),
        commit=commit,
    )


def _groups(prompts: Sequence[Prompt], rows: int) -> Iterator[list[Prompt]]:
    by_workload: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_workload.setdefault(prompt.workload, []).append(prompt)
    for same in by_workload.values():
        for start in range(0, len(same), rows):
            yield same[start : start + rows]


def _decode_group(
    pair: Pair,
    group: list[Prompt],
    encoded: list[tuple[int, ...]],
    config: RecordConfig,
    on_tokens: Callable[[int], None],
) -> list[RecordedText]:
    completions: list[tuple[int, ...]] = [() for _ in group]
    for newest in decode_texts(
        pair.target,
        encoded,
        max_new_tokens=config.max_new_tokens,
        stop_tokens=pair.stop_tokens,
        sampling=config.sampling,
    ):
        on_tokens(sum(map(len, newest)) - sum(map(len, completions)))
        completions = newest
    return [
        RecordedText(
            prompt_id=prompt.id, workload=prompt.workload, prompt=ids, completion=completion
        )
        for prompt, ids, completion in zip(group, encoded, completions, strict=True)
    ]
