"""Factors of a draft's LM head on disk, and the two-stage head that a draft loads from them.

They lie in a folder of their own, since engines load every `*.safetensors` file beside a
`config.json` as weights of the draft.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sgl_eagle.reference.finite_weights import require_finite
from sgl_eagle.reference.head_factors import HeadFactors, HeadProjection, row_norms
from sgl_eagle.reference.tensor_file import save_tensors
from sgl_eagle_harness.atomic_file import write_text
from sgl_eagle_harness.errors import CheckpointError
from sgl_eagle_harness.records import Record, describe_validation_error
from sgl_eagle_kernels.lm_head import (
    GlobalTop,
    LocalTop,
    Shortlist,
    TwoStageHead,
    build_two_stage_head,
)

FACTORS_FILE = "two_stage_head/factors.safetensors"
CONFIG_KEY = "two_stage_head"
"""Key of a draft's `config.json` that makes the engine use the factors."""

LmHead = Literal["full", "two-stage"]
"""Heads that a draft can propose with."""

_METADATA_KEY = "sgl_eagle_head_factors"
_NORM_SLACK = 0.01  # row norms in another dtype


class FactorsInfo(Record):
    """Where factors come from.

    Attributes:
        schema_version: Version of this layout.
        method: How they were made.
        rank: R.
        vocab_size: Rows of the head that was factorised.
        relative_error: Mean over sampled rows of `|W_i - A_i B| / |W_i|`.
        row_norms: Norms of evenly spread rows of the head, by which another head is told.
        num_tokens: Tokens counted for the frequencies, 0 if none were.
        smoothing: Count that every token starts with.
        text: What was counted.
    """

    schema_version: Literal[1] = 1
    method: Literal["freq-svd", "svd", "states-svd", "trained"]
    rank: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    relative_error: float = Field(ge=0, allow_inf_nan=False)
    row_norms: tuple[float, ...] = Field(min_length=1)
    num_tokens: int = Field(ge=0)
    smoothing: float = Field(ge=0)
    text: str


class GlobalShortlist(Record):
    """Stored form of `GlobalTop`."""

    kind: Literal["global"] = "global"
    num_candidates: int

    def build(self) -> GlobalTop:
        """Make the shortlist.

        Returns:
            The shortlist.
        """
        return GlobalTop(num_candidates=self.num_candidates)


class LocalShortlist(Record):
    """Stored form of `LocalTop`."""

    kind: Literal["local"] = "local"
    tile_size: int
    per_tile: int
    shuffle_seed: int | None = 0

    def build(self) -> LocalTop:
        """Make the shortlist.

        Returns:
            The shortlist.
        """
        return LocalTop(
            tile_size=self.tile_size, per_tile=self.per_tile, shuffle_seed=self.shuffle_seed
        )


class HeadConfig(Record):
    """What `config.json` says under `two_stage_head`.

    Attributes:
        factors: Name of the file of factors.
        shortlist: How candidates are chosen.
    """

    factors: str = FACTORS_FILE
    shortlist: Annotated[GlobalShortlist | LocalShortlist, Field(discriminator="kind")]


class StoredHead(NamedTuple):
    """A two-stage head and the file that its factors came from."""

    head: TwoStageHead
    file: Path


def save_factors(path: Path, factors: HeadFactors | HeadProjection, info: FactorsInfo) -> None:
    """Write factors, whole or not at all.

    Args:
        path: File.
        factors: A projection is stored in float32, factors of their own in bfloat16.
        info: Their provenance.

    Raises:
        OutputError: If the file cannot be written.
    """
    dtype = torch.float32 if isinstance(factors, HeadProjection) else torch.bfloat16
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in factors._asdict().items()
    }
    save_tensors(path, tensors, metadata={_METADATA_KEY: info.model_dump_json()})


def load_factors(path: Path, lm_head: Tensor) -> tuple[HeadFactors, FactorsInfo]:
    """Read the factors of a head.

    Args:
        path: File of `save_factors`.
        lm_head: [V, H] the head they belong to.

    Returns:
        The factors, and their provenance.

    Raises:
        CheckpointError: If the file is missing, damaged or not of factors, or they are those of
            another head.
    """
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(_METADATA_KEY)
            if text is None:
                raise CheckpointError(f"{path}: holds no head factors ({_METADATA_KEY} is missing)")
            info = FactorsInfo.model_validate_json(text)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    except ValidationError as error:
        raise CheckpointError(f"{path}: {describe_validation_error(error)}") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read, truncated?: {error}") from error
    vocab_size, hidden = lm_head.shape
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    down = ("down", (info.rank, hidden))
    allowed = (
        dict([("lift", (hidden, info.rank)), down]),
        dict([("up", (vocab_size, info.rank)), down]),
    )
    if shapes not in allowed or info.vocab_size != vocab_size:
        raise CheckpointError(
            f"{path}: holds {shapes} for a vocabulary of {info.vocab_size}; the draft's head "
            f"{[vocab_size, hidden]} needs {allowed[0]} or {allowed[1]}"
        )
    found = torch.tensor(row_norms(lm_head))
    if not torch.allclose(found, torch.tensor(info.row_norms), rtol=_NORM_SLACK, atol=0):
        raise CheckpointError(
            f"{path}: made for another head: its rows have norms {_shorten(info.row_norms)}..., "
            f"the draft's {_shorten(found.tolist())}..."
        )
    require_finite(path, tensors, torch.float32)
    if "lift" in tensors:
        return HeadProjection(**tensors).apply(lm_head), info
    return HeadFactors(**tensors), info


def _shorten(norms: Sequence[float]) -> str:
    return ", ".join(f"{norm:.3f}" for norm in norms[:3])


def wants_two_stage_head(folder: Path, choice: LmHead | None = None) -> bool:
    """Whether a draft proposes with a two-stage head.

    Args:
        folder: Draft checkpoint with a readable `config.json`.
        choice: None takes the two-stage head where the configuration has one.

    Returns:
        True also where it is wanted and there is none.
    """
    if choice is not None:
        return choice == "two-stage"
    return CONFIG_KEY in json.loads((folder / "config.json").read_text("utf-8"))


def load_two_stage_head(
    folder: Path, lm_head: Tensor, choice: LmHead | None = None, *, int8: bool = False
) -> StoredHead | None:
    """The two-stage head of a draft.

    Args:
        folder: Draft checkpoint with a readable `config.json`.
        lm_head: [V, H] full head of the draft, in the dtype and on the device to run in.
        choice: None takes the two-stage head where the configuration has one.
        int8: Keep the low-rank head in eight bits.

    Returns:
        The head; None where the full head is to be used.

    Raises:
        CheckpointError: If a two-stage head is wanted and there is none, its configuration or
            factors cannot be used, or the factors are those of another head.
    """
    source = folder / "config.json"
    raw = json.loads(source.read_text("utf-8")).get(CONFIG_KEY)
    if raw is None and choice == "two-stage":
        raise CheckpointError(
            f"--lm-head two-stage needs {CONFIG_KEY} in {source}, which has none: make factors "
            f"with `sgl-eagle head factorize --draft {folder} --activate local:64:1`"
        )
    if raw is None or choice == "full":
        return None
    try:
        config = HeadConfig.model_validate(raw)
        shortlist = config.shortlist.build()
    except ValidationError as error:
        raise CheckpointError(
            f"{source}: {CONFIG_KEY}: {describe_validation_error(error)}"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{source}: {CONFIG_KEY}: {error}") from error
    path = folder / config.factors
    factors, _ = load_factors(path, lm_head)
    return StoredHead(join_factors(lm_head, factors, shortlist, source=path, int8=int8), path)


def join_factors(
    lm_head: Tensor,
    factors: HeadFactors,
    shortlist: Shortlist,
    *,
    source: Path,
    int8: bool = False,
) -> TwoStageHead:
    """Put factors and full head together.

    Args:
        lm_head: [V, H]; decides dtype and device.
        factors: Of that head.
        shortlist: How candidates are chosen.
        source: File of the factors, for messages.
        int8: Keep A in eight bits.

    Returns:
        The head.

    Raises:
        CheckpointError: If the shortlist does not fit the vocabulary.
    """
    up, down = (tensor.to(lm_head.device, lm_head.dtype) for tensor in factors)
    try:
        return build_two_stage_head(lm_head, up, down, shortlist, quantize=int8)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from error


def activate_head(folder: Path, shortlist: GlobalShortlist | LocalShortlist) -> None:
    """Make a draft use the factors that lie beside it.

    Args:
        folder: Draft checkpoint with a readable `config.json`.
        shortlist: How candidates are chosen.

    Raises:
        OutputError: If `config.json` cannot be written.
    """
    source = folder / "config.json"
    raw = json.loads(source.read_text("utf-8"))
    raw[CONFIG_KEY] = HeadConfig(shortlist=shortlist).model_dump()
    write_text(source, json.dumps(raw, indent=2) + "\n")


def describe_head(head: TwoStageHead | None) -> str:
    """The head that a draft proposes with, in words.

    Args:
        head: None is the full head.

    Returns:
        E.g. "two-stage LM head of rank 128, local 64 x 1, shuffled".
    """
    if head is None:
        return "full LM head"
    return f"two-stage LM head of rank {head.up.shape[1]}, {describe_shortlist(head.shortlist)}"


def describe_shortlist(shortlist: Shortlist) -> str:
    """A shortlist in words.

    Args:
        shortlist: Any.

    Returns:
        E.g. "local 64 x 1, shuffled".
    """
    if isinstance(shortlist, LocalTop):
        order = "natural order" if shortlist.shuffle_seed is None else "shuffled"
        return f"local {shortlist.tile_size} x {shortlist.per_tile}, {order}"
    return f"global {shortlist.num_candidates}"
