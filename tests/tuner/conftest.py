"""Dense traces of a small random language, made the way a recorder would make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from sgl_eagle_harness.cost_table import CostGrid, CostSetup, CostTable
from sgl_eagle_harness.dense_trace import DenseTrace, PromptTrace
from sgl_eagle_harness.records import ModelIdentity
from sgl_eagle_harness.trace_schema import PromptSource, SamplingParams, TraceHeader
from sgl_eagle_harness.trace_store import read_dense_trace, write_dense_shard
from sgl_eagle_harness.types import BoolArray, Children, IntArray

VOCAB_SIZE = 12
CREATED = datetime(2026, 1, 1, tzinfo=UTC)


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
        created=CREATED,
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
class Corpus:
    """A trace and what it was recorded from."""

    trace: DenseTrace
    paths: list[Path]
    languages: list[Language]
    texts: list[list[int]]


def avoid_drafts(language: Language, text: list[int], topk: int) -> list[int]:
    """The same length of text, made of tokens that the draft ranks just below what it offers."""
    avoided = text[:2]
    while len(avoided) < len(text):
        avoided.append(int(language.best[avoided[-2], avoided[-1]][topk]))
    return avoided


def record_corpus(  # noqa: PLR0913 (a table of settings, all with defaults)
    folder: Path,
    *,
    workloads: tuple[str, ...] = ("chat", "code"),
    num_prompts: int = 6,
    length: int = 40,
    beams: tuple[int, ...] = (1, 2, 4),
    num_steps: int = 4,
    temperature: float = 0.0,
    seed: int = 0,
    first_prompt: int = 0,
    always_wrong: bool = False,
) -> Corpus:
    # One shard a workload; each workload's draft is blurred differently.
    rng = np.random.default_rng(seed)
    header = make_header(beams, num_steps, temperature)
    paths, languages, texts = [], [], []
    for blur, workload in enumerate(workloads):
        language = Language(rng, sharpness=3.0, draft_noise=0.5 + 1.5 * blur)
        prompts = []
        for number in range(first_prompt, first_prompt + num_prompts):
            text = language.sample(rng, int(rng.integers(length // 2, length + 1)))
            name = f"{workload}-{number}"
            if always_wrong:
                text = avoid_drafts(language, text, header.topk)
            prompts.append(record_prompt(language, text, header, name, workload))
            languages.append(language)
            texts.append(text)
        paths.append(folder / f"{workload}.parquet")
        write_dense_shard(paths[-1], header, prompts)
    trace = read_dense_trace(paths)
    return Corpus(trace=trace, paths=paths, languages=languages, texts=texts)


@pytest.fixture(scope="session")
def record() -> Callable[..., Corpus]:
    return record_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return record_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def sampled_corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return record_corpus(tmp_path_factory.mktemp("sampled"), temperature=1.0)


class LiveDrafter:
    """Drafts one tree from the language itself, as an engine does; B = 1."""

    def __init__(self, language: Language, before: tuple[int, int]) -> None:
        self._language = language
        self._states = {-1: before}

    def expand_root(self, topk: int) -> Children:
        return self._children([-1], np.ones((1, 1), np.bool_), topk)

    def expand(self, handles: IntArray, topk: int) -> Children:
        return self._children(handles[0].tolist(), handles != -1, topk)

    def _children(self, nodes: list[int], asked: BoolArray, topk: int) -> Children:
        shape = (1, len(nodes), topk)
        tokens, handles = np.zeros(shape, np.int64), np.full(shape, -1)
        log_probs = np.full(shape, -np.inf, np.float32)
        for column, node in enumerate(nodes):
            if not asked[0, column]:
                continue
            state = self._states[node]
            best = self._language.best[state][:topk]
            tokens[0, column] = best
            log_probs[0, column] = self._language.draft_log_probs[state][best]
            for rank, token in enumerate(best.tolist()):
                handles[0, column, rank] = len(self._states)
                self._states[len(self._states)] = (state[1], token)
        valid = np.repeat(asked[:, :, None], topk, axis=2)
        return Children(tokens=tokens, log_probs=log_probs, handles=handles, valid=valid)


def make_costs(
    *,
    batch_sizes: tuple[int, ...] = (1,),
    target: tuple[float, float] = (1000.0, 20.0),
    draft: tuple[float, float] = (80.0, 4.0),
    decide_us: float = 5.0,
    largest: int = 64,
) -> CostTable:
    digest, dims = "0" * 64, {"hidden_size": 8}
    setup = CostSetup(
        device="none",
        tensor_parallel_size=1,
        dtype="float32",
        attention_backend="none",
        engine="markov",
        engine_version="0",
        num_threads=1,
        target=ModelIdentity(name="markov-target", sha256=digest, dims=dims),
        draft=ModelIdentity(name="markov-draft", sha256=digest, dims=dims),
    )

    def grid(kind: str, fixed: float, slope: float) -> CostGrid:
        batch, tokens, context = (
            np.array(batch_sizes),
            np.array([1, 2, 3, largest]),
            np.array([0, 512]),
        )
        us = fixed + slope * batch[:, None, None] * tokens[:, None] + 0.05 * context
        return CostGrid(kind=kind, batch_size=batch, num_tokens=tokens, context_len=context, us=us)

    return CostTable(
        setup=setup,
        target=grid("target", *target),
        draft=grid("draft", *draft),
        draft_extend=grid("draft_extend", *draft),
        decide_us=decide_us,
        verify_select_us=3.0,
    )


@pytest.fixture(scope="session")
def costs() -> CostTable:
    return make_costs()


@pytest.fixture(scope="session")
def cost_maker() -> Callable[..., CostTable]:
    return make_costs


@pytest.fixture(scope="session")
def live_drafter() -> Callable[[Language, tuple[int, int]], LiveDrafter]:
    return LiveDrafter


@pytest.fixture(scope="session")
def created() -> datetime:
    return CREATED
