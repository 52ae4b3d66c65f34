"""Random but well-formed prompt traces for tests."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np

from sgl_eagle_harness.dense_trace import PromptTrace
from sgl_eagle_harness.records import ModelIdentity
from sgl_eagle_harness.trace_schema import (
    PromptSource,
    SamplingParams,
    SourceFile,
    TraceHeader,
)

VOCAB = 97


def make_header(**changes) -> TraceHeader:
    fields = {
        "kind": "dense",
        "target": ModelIdentity(name="target", sha256="a" * 64, dims={"hidden_size": 8}),
        "draft": ModelIdentity(name="draft", sha256="b" * 64, dims={"hidden_size": 8}),
        "engine": "reference",
        "versions": {"sgl-eagle": "0.1.0"},
        "head_kind": "eagle3",
        "vocab_size": VOCAB,
        "num_steps": 3,
        "topk": 2,
        "beams": (1, 2),
        "dtype": "float32",
        "sampling": SamplingParams(temperature=0.0),
        "prompts": PromptSource(kind="text", files=(SourceFile(name="p.jsonl", sha256="c" * 64),)),
        "forced_continuation": False,
        "censored": False,
        "created": datetime(2026, 1, 1, tzinfo=UTC),
    }
    return TraceHeader(**(fields | changes))


def make_prompt(
    rng: np.random.Generator,
    *,
    prompt_id: str = "p0",
    workload: str = "code",
    num_positions: int = 12,
    num_steps: int = 3,
    topk: int = 2,
    agreement: float = 0.7,
    holes: bool = False,
) -> PromptTrace:
    # A complete topk tree of every position; the best child is the text's token in `agreement` of
    # all groups whatever its probability says, so confidences are uninformative on purpose.
    text = rng.integers(0, VOCAB, num_positions)
    parents, depths = _complete_tree(num_steps, topk)
    width = len(parents)
    tokens = np.zeros((num_positions, width), np.int32)
    logs = np.zeros((num_positions, width), np.float32)
    for row in range(num_positions):
        for start in range(0, width, topk):
            offset = row + depths[start] - 1
            siblings = rng.permutation(VOCAB)[:topk]
            if offset < num_positions and rng.random() < agreement:
                siblings[0] = VOCAB if text[offset] in siblings else siblings[0]
                siblings = np.where(siblings == text[offset], VOCAB, siblings)
                siblings[siblings == VOCAB] = [
                    token
                    for token in range(VOCAB)
                    if token not in siblings and token != text[offset]
                ][: int((siblings == VOCAB).sum())]
                siblings[0] = text[offset]
            tokens[row, start : start + topk] = siblings
            shares = np.sort(rng.dirichlet(np.ones(topk + 1)))[::-1][:topk]
            logs[row, start : start + topk] = np.log(np.maximum(shares, 1e-6))
    all_depths = np.tile(depths, (num_positions, 1)).astype(np.int8)
    if holes:
        last = depths == num_steps
        dropped = rng.random(num_positions) < 0.5
        all_depths[np.ix_(dropped, last)] = 0
    return PromptTrace(
        prompt_id=prompt_id,
        workload=workload,
        context_len=np.arange(num_positions) + 5,
        next_token=text.astype(np.int32),
        tokens=tokens,
        parents=np.tile(parents, (num_positions, 1)).astype(np.int16),
        depths=all_depths,
        step_log_probs=logs,
    )


def _complete_tree(num_steps: int, topk: int) -> tuple[np.ndarray, np.ndarray]:
    parents, depths = [-1] * topk, [1] * topk
    level = list(range(topk))
    for depth in range(2, num_steps + 1):
        start = len(parents)
        for node in level:
            parents += [node] * topk
            depths += [depth] * topk
        level = list(range(start, len(parents)))
    return np.array(parents), np.array(depths)
