"""Low-rank factors of an LM head: made from its weights, kept beside the draft, loaded with it.

All factorisations are one: of all matrices of rank r, the product A B is nearest to W in the norm
`|| F^1/2 (W - A B) M^1/2 ||`, where F weighs tokens by their frequency and M is the second moment
of the head's inputs. With `F^1/2 W M^1/2 = U S V^T` the solution is `B = V_r^T M^-1/2` and
`A = F^-1/2 U_r S_r = W M^1/2 V_r`. Plain SVD leaves both out, frequency-aware SVD leaves M out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sgl_eagle_harness.atomic_file import replace_when_done, write_text
from sgl_eagle_harness.errors import CheckpointError
from sgl_eagle_harness.records import Record, describe_validation_error
from sgl_eagle_kernels.lm_head import (
    GlobalTop,
    LocalTop,
    Shortlist,
    TwoStageHead,
    build_two_stage_head,
)

FACTORS_FILE = "head_factors.safetensors"
CONFIG_KEY = "two_stage_head"
"""Key of a draft's `config.json` that makes the engine use the factors."""

METHODS = ("freq-svd", "svd", "states-svd")
HeadMethod = Literal["freq-svd", "svd", "states-svd"]

_METADATA_KEY = "sgl_eagle_head_factors"
_CHECKED_ROWS = 64
_ERROR_SLACK = 0.1  # the error of a sample of rows against that of all rows
_LEAST_SHARE = 1e-6  # of the largest eigenvalue: directions that inputs hardly use stay invertible


class HeadFactors(NamedTuple):
    """A head of low rank.

    Attributes:
        up: [V, R], A.
        down: [R, H], B.
    """

    up: Tensor
    down: Tensor


class FactorsInfo(Record):
    """Where factors come from.

    Attributes:
        schema_version: Version of this layout.
        method: How they were made.
        rank: R.
        vocab_size: Rows of the head that was factorised.
        relative_error: Mean over sampled rows of `|W_i - A_i B| / |W_i|`, by which factors of
            another head are told.
        num_tokens: Tokens counted for the frequencies, 0 if none were.
        smoothing: Count that every token starts with.
        text: What was counted.
    """

    schema_version: Literal[1] = 1
    method: Literal["freq-svd", "svd", "states-svd", "trained"]
    rank: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    relative_error: float = Field(ge=0, allow_inf_nan=False)
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


def smooth_frequencies(counts: Tensor, smoothing: float) -> Tensor:
    """Token frequencies that are above zero.

    Args:
        counts: [V] occurrences.
        smoothing: Added to every count, above 0.

    Returns:
        [V] float64 that sums to 1.

    Raises:
        ValueError: If `smoothing` is not above 0.
    """
    if smoothing <= 0:
        raise ValueError(f"smoothing must be above 0, got {smoothing}")
    smoothed = counts.double() + smoothing
    return smoothed / smoothed.sum()


def factorize_head(
    weight: Tensor,
    rank: int,
    *,
    frequencies: Tensor | None = None,
    second_moment: Tensor | None = None,
) -> HeadFactors:
    """The nearest head of a rank; see the module's docstring for what near means.

    Args:
        weight: [V, H] full head.
        rank: R, at most H.
        frequencies: [V] above 0; None weighs all tokens alike.
        second_moment: [H, H] mean of `h h^T` over the head's inputs; None takes the identity.

    Returns:
        Factors in float32, directions in order of their weight: the first r rows of `down` and
        columns of `up` are the factors of rank r.

    Raises:
        ValueError: If the rank is out of range.
    """
    hidden = weight.shape[1]
    if not 1 <= rank <= hidden:
        raise ValueError(f"rank must be in [1, {hidden}], got {rank}")
    w = weight.double()
    weighted = w if frequencies is None else w * frequencies.double().sqrt()[:, None]
    # The right singular vectors suffice, and H by H is far smaller than V by H.
    gram = weighted.T @ weighted
    root = inverse = None
    if second_moment is not None:
        values, vectors = torch.linalg.eigh(second_moment.double())
        values = values.clamp(min=float(values[-1]) * _LEAST_SHARE)
        root = (vectors * values.sqrt()) @ vectors.T
        inverse = (vectors / values.sqrt()) @ vectors.T
        gram = root @ gram @ root
    leading = torch.linalg.eigh(gram).eigenvectors.flip(1)[:, :rank]
    up = w @ (leading if root is None else root @ leading)
    down = leading.T if inverse is None else leading.T @ inverse
    return HeadFactors(up.float(), down.float().contiguous())


def relative_error(weight: Tensor, factors: HeadFactors) -> float:
    """How far some evenly spread rows of a head are from their low-rank rows.

    Args:
        weight: [V, H].
        factors: Of any head.

    Returns:
        Mean of `|W_i - A_i B| / |W_i|`.
    """
    vocab_size = factors.up.shape[0]
    rows = torch.arange(min(_CHECKED_ROWS, vocab_size), device=weight.device)
    rows = rows * vocab_size // len(rows)
    wanted = weight[rows].float()
    found = factors.up[rows].float() @ factors.down.float()
    scale = wanted.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((wanted - found).norm(dim=1) / scale).mean())


def save_factors(path: Path, factors: HeadFactors, info: FactorsInfo) -> None:
    """Write factors, whole or not at all.

    Args:
        path: File.
        factors: Stored in bfloat16.
        info: Their provenance.

    Raises:
        OutputError: If the file cannot be written.
    """
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in factors._asdict().items()
    }
    with replace_when_done(path) as temporary:
        save_file(tensors, temporary, metadata={_METADATA_KEY: info.model_dump_json()})


def load_factors(path: Path) -> tuple[HeadFactors, FactorsInfo]:
    """Read factors.

    Args:
        path: File of `save_factors`.

    Returns:
        The factors in bfloat16, and their provenance.

    Raises:
        CheckpointError: If the file is missing, damaged or not of factors.
    """
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(_METADATA_KEY)
            if text is None:
                raise CheckpointError(f"{path}: holds no head factors ({_METADATA_KEY} is missing)")
            info = FactorsInfo.model_validate_json(text)
            factors = HeadFactors(file.get_tensor("up"), file.get_tensor("down"))
    except ValidationError as error:
        raise CheckpointError(f"{path}: {describe_validation_error(error)}") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read, truncated?: {error}") from error
    expected = ((info.vocab_size, info.rank), (info.rank, factors.down.shape[-1]))
    if (tuple(factors.up.shape), tuple(factors.down.shape)) != expected:
        raise CheckpointError(
            f"{path}: up and down must be [{info.vocab_size}, {info.rank}] and [{info.rank}, H], "
            f"got {list(factors.up.shape)} and {list(factors.down.shape)}"
        )
    return factors, info


def load_two_stage_head(folder: Path, lm_head: Tensor) -> TwoStageHead | None:
    """The two-stage head that a draft's `config.json` asks for.

    Args:
        folder: Draft checkpoint with a readable `config.json`.
        lm_head: [V, H] full head of the draft, in the dtype and on the device to run in.

    Returns:
        The head, or None where the configuration has no such key.

    Raises:
        CheckpointError: If the key or the factors cannot be used, or the factors are those of
            another head.
    """
    source = folder / "config.json"
    raw = json.loads(source.read_text("utf-8")).get(CONFIG_KEY)
    if raw is None:
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
    factors, info = load_factors(path)
    require_same_head(path, factors, info, lm_head)
    return join_factors(lm_head, factors, shortlist, source=path)


def require_same_head(path: Path, factors: HeadFactors, info: FactorsInfo, lm_head: Tensor) -> None:
    """Refuse factors of another head.

    Args:
        path: Their file, for the message.
        factors: Loaded factors.
        info: Their provenance.
        lm_head: [V, H] head they are to stand in for.

    Raises:
        CheckpointError: If shapes differ, or the product is not as near to the head as it was.
    """
    wanted = tuple(lm_head.shape)
    if (info.vocab_size, factors.down.shape[1]) != wanted:
        raise CheckpointError(
            f"{path}: factors of a head [{info.vocab_size}, {factors.down.shape[1]}], but the "
            f"draft's is {list(wanted)}"
        )
    moved = HeadFactors(*(tensor.to(lm_head.device) for tensor in factors))
    error = relative_error(lm_head, moved)
    if not error <= info.relative_error + _ERROR_SLACK:
        raise CheckpointError(
            f"{path}: made for another head: it is {error:.3f} away from this one, was "
            f"{info.relative_error:.3f} from its own"
        )


def join_factors(
    lm_head: Tensor, factors: HeadFactors, shortlist: Shortlist, *, source: Path
) -> TwoStageHead:
    """Put factors and full head together.

    Args:
        lm_head: [V, H]; decides dtype and device.
        factors: Of that head.
        shortlist: How candidates are chosen.
        source: File of the factors, for messages.

    Returns:
        The head.

    Raises:
        CheckpointError: If the shortlist does not fit the vocabulary.
    """
    up, down = (tensor.to(lm_head.device, lm_head.dtype) for tensor in factors)
    try:
        return build_two_stage_head(lm_head, up, down, shortlist)
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
