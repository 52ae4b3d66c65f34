"""Dense traces of a small random language, made the way a recorder would make them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_eagle_harness.dense_trace import DenseTrace, PromptTrace
from sgl_eagle_harness.records import ModelIdentity
from sgl_eagle_harness.trace_schema import PromptSource, SamplingParams, TraceHeader
from sgl_eagle_harness.trace_store import read_dense_trace, write_dense_shard

VOCAB_SIZE = 12


@dataclass
class Recording:
    """Nodes of one position in draft order; the root is not a node."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    step_log_probs: list[np.float32] = field(default_factory=list)
    target_log_probs: list[np.float32] = field(default_factory=list)
    path_log_confidence: list[np.float32] = field(default_factory=list)
    first_child: dict[int, int] = field(default_factory=dict)


class Language:
    """An order-two Markov target and a draft that blurs it."""

    def __init__(self, rng: np.random.Generator, sharpness: float, draft_noise: float) -> None:
        shape = (VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)
        logits = sharpness * rng.standard_normal(shape)
        self.target_log_probs = _log_softmax(logits)
        self.draft_log_probs = _log_softmax(logits + draft_noise * rng.standard_normal(shape))
        self.best = np.argsort(-self.draft_log_probs, axis=-1, kind="stable")

    def sample(self, rng: np.random.Generator, length: int) -> list[int]:
        text = [int(t) for t in rng.integers(VOCAB_SIZE, size=2)]
        while len(text) < length + 2:
            probs = np.exp(self.target_log_probs[text[-2], text[-1]].astype(np.float64))
            text.append(int(rng.choice(VOCAB_SIZE, p=probs / probs.sum())))
        return text

    def record(
        self, before: tuple[int, int], beams: tuple[int, ...], topk: int, num_steps: int
    ) -> Recording:
        nodes = Recording()
        root = self._expand(nodes, -1, before, topk, 1)
        newest = {beam: root[:beam] for beam in beams}
        states = {node: (before[1], nodes.tokens[node]) for node in root}
        for depth in range(2, num_steps + 1):
            frontiers = {
                beam: sorted(newest[beam], key=lambda n: (-nodes.path_log_confidence[n], n))[:beam]
                for beam in beams
            }
            children: dict[int, list[int]] = {}
            for node in sorted(set().union(*frontiers.values())):
                children[node] = self._expand(nodes, node, states[node], topk, depth)
                for child in children[node]:
                    states[child] = (states[node][1], nodes.tokens[child])
            newest = {
                beam: [child for node in frontiers[beam] for child in children[node][:beam]]
                for beam in beams
            }
        return nodes

    def _expand(
        self, nodes: Recording, parent: int, state: tuple[int, int], topk: int, depth: int
    ) -> list[int]:
        first = len(nodes.tokens)
        nodes.first_child[parent] = first
        inherited = np.float32(0) if parent < 0 else nodes.path_log_confidence[parent]
        for rank in range(topk):
            token = int(self.best[state][rank])
            step = self.draft_log_probs[state][token]
            nodes.tokens.append(token)
            nodes.parents.append(parent)
            nodes.depths.append(depth)
            nodes.ranks.append(rank)
            nodes.step_log_probs.append(step)
            nodes.target_log_probs.append(self.target_log_probs[state][token])
            nodes.path_log_confidence.append(np.float32(inherited + step))
        return list(range(first, first + topk))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))).astype(np.float32)


def pad_nodes(recordings: list[Recording], name: str, dtype: type, fill: float) -> np.ndarray:
    width = max(len(nodes.tokens) for nodes in recordings)
    padded = np.full((len(recordings), width), fill, dtype)
    for row, nodes in enumerate(recordings):
        values = getattr(nodes, name)
        padded[row, : len(values)] = values
    return padded


def make_header(beams: tuple[int, ...], num_steps: int, temperature: float) -> TraceHeader:
    digest = "0" * 64
    dims = {"hidden_size": 8}
    return TraceHeader(
        kind="dense",
        target=ModelIdentity(name="markov-target", sha256=digest, dims=dims),
        draft=ModelIdentity(name="markov-draft", sha256=digest, dims=dims),
        engine="markov",
        versions={},
        head_kind="markov",
        vocab_size=VOCAB_SIZE,
        num_steps=num_steps,
        topk=beams[-1],
        beams=beams,
        dtype="float32",
        sampling=SamplingParams(temperature=temperature, seed=0 if temperature else None),
        prompts=PromptSource(kind="text", files=()),
        forced_continuation=False,
        censored=False,
        created=datetime(2026, 1, 1, tzinfo=UTC),
    )


def record_prompt(
    language: Language, text: list[int], header: TraceHeader, prompt_id: str, workload: str
) -> PromptTrace:
    length = len(text) - 2
    recordings = [
        language.record((text[i], text[i + 1]), header.beams, header.topk, header.num_steps)
        for i in range(length)
    ]
    greedy = header.sampling.temperature == 0
    return PromptTrace(
        prompt_id=prompt_id,
        workload=workload,
        context_len=np.arange(1, length + 1),
        next_token=np.array(text[2:], np.int32),
        tokens=pad_nodes(recordings, "tokens", np.int32, 0),
        parents=pad_nodes(recordings, "parents", np.int16, -1),
        depths=pad_nodes(recordings, "depths", np.int8, 0),
        step_log_probs=pad_nodes(recordings, "step_log_probs", np.float32, -np.inf),
        target_log_probs=None
        if greedy
        else pad_nodes(recordings, "target_log_probs", np.float32, -np.inf),
    )


@dataclass(frozen=True, kw_only=True)
class TraceMaker:
    """Writes shards of a random language; each workload blurs the draft differently."""

    folder: Path

    def write(
        self,
        *,
        workloads: tuple[str, ...] = ("chat", "code"),
        num_prompts: int = 6,
        length: int = 40,
        beams: tuple[int, ...] = (1, 2, 4),
        num_steps: int = 4,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[Path]:
        rng = np.random.default_rng(seed)
        header = make_header(beams, num_steps, temperature)
        paths = []
        for blur, workload in enumerate(workloads):
            language = Language(rng, sharpness=3.0, draft_noise=0.5 + 1.5 * blur)
            prompts = [
                record_prompt(
                    language,
                    language.sample(rng, int(rng.integers(length // 2, length + 1))),
                    header,
                    f"{workload}-{number}",
                    workload,
                )
                for number in range(num_prompts)
            ]
            paths.append(self.folder / f"{workload}-{seed}.parquet")
            write_dense_shard(paths[-1], header, prompts)
        return paths

    def make(self, **settings: Any) -> DenseTrace:
        return read_dense_trace(self.write(**settings))


@pytest.fixture
def traces(tmp_path: Path) -> TraceMaker:
    return TraceMaker(folder=tmp_path)


@pytest.fixture(scope="session")
def small_trace(tmp_path_factory: pytest.TempPathFactory) -> DenseTrace:
    return TraceMaker(folder=tmp_path_factory.mktemp("small")).make()


@pytest.fixture(scope="session")
def sampled_trace(tmp_path_factory: pytest.TempPathFactory) -> DenseTrace:
    return TraceMaker(folder=tmp_path_factory.mktemp("sampled")).make(temperature=1.0)
