"""Versioned trace records: what a shard's header says and which columns its rows have."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa
from pydantic import AwareDatetime, Field, model_validator

from sgl_eagle_harness.records import ModelIdentity, Record, Sha256
from sgl_eagle_harness.types import MAX_STEPS, MAX_TOPK

TRACE_SCHEMA_VERSION: Literal[1] = 1
HEADER_KEY = b"sgl_eagle_trace"
"""Key of the header's JSON in the Parquet file's metadata."""

TraceKind = Literal["dense", "ordinary"]


class SamplingParams(Record):
    """Effective sampling parameters of the target, defaults resolved.

    Attributes:
        temperature: 0 is greedy decoding.
        top_p: Nucleus mass in (0, 1]; 1 keeps every token.
        top_k: Tokens kept; 0 keeps every token.
        seed: Seed of the sampler; None where the text is greedy.
    """

    temperature: float = Field(ge=0.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    seed: int | None = None


class SourceFile(Record):
    """A file that a record was made from.

    Attributes:
        name: File name without folders.
        sha256: Digest of its bytes.
    """

    name: str = Field(min_length=1)
    sha256: Sha256


class PromptSource(Record):
    """Where the prompts came from.

    Attributes:
        kind: "text" for prompts that people or models wrote; "random_tokens" for synthetic ids,
            which readers refuse: no draft head accepts on them as it does on text.
        files: Prompt files.
    """

    kind: Literal["text", "random_tokens"]
    files: tuple[SourceFile, ...]


class TraceHeader(Record):
    """Provenance of one shard, stored as JSON in its metadata.

    Attributes:
        schema_version: Version of header and columns.
        kind: "dense" holds the largest tree of every position; "ordinary" what an engine verified.
        target: Model whose text was recorded.
        draft: Model that proposed the nodes.
        engine: What recorded, e.g. "reference".
        versions: Package name to version.
        head_kind: Draft architecture, e.g. "eagle3".
        vocab_size: Target vocabulary; every token id is below it.
        num_steps: Greatest depth recorded.
        topk: Children stored of every expanded node.
        beams: Beam widths whose frontiers were expanded, each at most `topk`, ascending.
        dtype: Dtype in which target and draft ran, e.g. "bfloat16".
        sampling: How the target chose its tokens.
        prompts: Prompt source.
        forced_continuation: Whether generation went on past the target's end of text.
        censored: Whether the recording policy stopped or pruned, so that nodes are missing.
        created: Time of recording, with its zone.
        commit: Source revision of the recorder, if known.
    """

    schema_version: Literal[1] = TRACE_SCHEMA_VERSION
    kind: TraceKind
    target: ModelIdentity
    draft: ModelIdentity
    engine: str = Field(min_length=1)
    versions: dict[str, str]
    head_kind: str = Field(min_length=1)
    vocab_size: int = Field(ge=1)
    num_steps: int = Field(ge=1, le=MAX_STEPS)
    topk: int = Field(ge=1, le=MAX_TOPK)
    beams: tuple[int, ...] = Field(min_length=1)
    dtype: str = Field(min_length=1)
    sampling: SamplingParams
    prompts: PromptSource
    forced_continuation: bool
    censored: bool
    created: AwareDatetime
    commit: str | None = None

    @model_validator(mode="after")
    def _check_beams(self) -> TraceHeader:
        if list(self.beams) != sorted(set(self.beams)) or self.beams[0] < 1:
            raise ValueError(f"beams must be ascending and at least 1, got {list(self.beams)}")
        if self.beams[-1] > self.topk:
            raise ValueError(f"beams must not exceed topk={self.topk}, got {list(self.beams)}")
        return self


MERGED_FIELDS = (
    "target",
    "draft",
    "engine",
    "head_kind",
    "vocab_size",
    "num_steps",
    "topk",
    "beams",
    "dtype",
)
"""Header fields that must agree before shards are read as one trace; sampling is compared too,
without its seed."""


_PLACE = [
    pa.field("prompt_id", pa.string(), nullable=False),
    pa.field("workload", pa.string(), nullable=False),
    pa.field("position", pa.int32(), nullable=False),
    pa.field("context_len", pa.int64(), nullable=False),
]

NODE_COLUMNS = {
    "tokens": pa.int32(),
    "parents": pa.int16(),
    "depths": pa.int8(),
    "ranks": pa.int8(),
    "step_log_probs": pa.float32(),
    "on_path": pa.bool_(),
}
"""List columns of a dense row, one element a node; `target_log_probs` may follow."""

TARGET_COLUMN = "target_log_probs"


def dense_schema(*, with_target_log_probs: bool) -> pa.Schema:
    """Columns of a dense shard: one row a position, nodes in list columns.

    Args:
        with_target_log_probs: Whether the target scored the nodes (temperature above 0).

    Returns:
        Arrow schema without metadata.
    """
    nodes = dict(NODE_COLUMNS)
    if with_target_log_probs:
        nodes[TARGET_COLUMN] = pa.float32()
    lists = [
        pa.field(name, pa.list_(pa.field("element", kind, nullable=False)), nullable=False)
        for name, kind in nodes.items()
    ]
    return pa.schema([*_PLACE, pa.field("next_token", pa.int32(), nullable=False), *lists])


def ordinary_schema() -> pa.Schema:
    """Columns of an ordinary shard: one row a verify pass, its tree in list columns.

    Returns:
        Arrow schema without metadata.
    """
    lists = {
        "tokens": pa.int32(),
        "parents": pa.int16(),
        "path_log_confidence": pa.float32(),
        "accepted": pa.int16(),
    }
    return pa.schema(
        [
            *_PLACE,
            pa.field("bonus_token", pa.int32(), nullable=False),
            *(
                pa.field(name, pa.list_(pa.field("element", kind, nullable=False)), nullable=False)
                for name, kind in lists.items()
            ),
        ]
    )
