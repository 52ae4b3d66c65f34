"""Low-rank factors of an LM head: made from its weights, kept beside the draft, loaded with it.

All factorisations are one: of all matrices of rank r, the product A B is nearest to W in the norm
`|| F^1/2 (W - A B) M^1/2 ||`, where F weighs tokens by their frequency and M is the second moment
of the head's inputs. With `F^1/2 W M^1/2 = U S V^T` the solution is `B = V_r^T M^-1/2` and
`A = F^-1/2 U_r S_r = W M^1/2 V_r`. Plain SVD leaves both out, frequency-aware SVD leaves M out.

A is thus W times a small matrix, so a file holds that and B: two matrices of H by r.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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

_METADATA_KEY = "sgl_eagle_head_factors"
_ERROR_ROWS = 64
_NORM_ROWS = 16
_NORM_SLACK = 0.01  # row norms in another dtype
_LEAST_SHARE = 1e-6  # of the largest eigenvalue: directions that inputs hardly use stay invertible


class HeadFactors(NamedTuple):
    """A head of low rank.

    Attributes:
        up: [V, R], A.
        down: [R, H], B.
    """

    up: Tensor
    down: Tensor


class HeadProjection(NamedTuple):
    """Factors whose A is the full head times a small matrix.

    Attributes:
        lift: [H, R] float32.
        down: [R, H] float32, B.
    """

    lift: Tensor
    down: Tensor

    def apply(self, weight: Tensor) -> HeadFactors:
        """Make the factors of a head.

        Args:
            weight: [V, H] full head.

        Returns:
            Factors in float32 on its device.
        """
        lift, down = self.lift.to(weight.device), self.down.to(weight.device)
        return HeadFactors(weight.float() @ lift, down)


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
) -> HeadProjection:
    """The nearest head of a rank; see the module's docstring for what near means.

    Args:
        weight: [V, H] full head.
        rank: R, at most H.
        frequencies: [V] above 0; None weighs all tokens alike.
        second_moment: [H, H] mean of `h h^T` over the head's inputs; None takes the identity.

    Returns:
        The projection, directions in order of their weight: the first r rows of `down` and columns
        of `lift` are those of rank r.

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
    lift = leading if root is None else root @ leading
    down = leading.T if inverse is None else leading.T @ inverse
    return HeadProjection(lift.float().contiguous(), down.float().contiguous())


def relative_error(weight: Tensor, factors: HeadFactors) -> float:
    """How far some evenly spread rows of a head are from their low-rank rows.

    Args:
        weight: [V, H].
        factors: Of any head.

    Returns:
        Mean of `|W_i - A_i B| / |W_i|`.
    """
    rows = _spread(weight, _ERROR_ROWS)
    wanted = weight[rows].float()
    found = factors.up[rows].float() @ factors.down.float()
    scale = wanted.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((wanted - found).norm(dim=1) / scale).mean())


def row_norms(weight: Tensor) -> tuple[float, ...]:
    """What tells one head from another in any dtype.

    Args:
        weight: [V, H].

    Returns:
        Norms of some evenly spread rows.
    """
    return tuple(weight[_spread(weight, _NORM_ROWS)].float().norm(dim=1).tolist())


def _spread(weight: Tensor, count: int) -> Tensor:
    vocab_size = weight.shape[0]
    rows = torch.arange(min(count, vocab_size), device=weight.device)
    return rows * vocab_size // len(rows)


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
    with replace_when_done(path) as temporary:
        save_file(tensors, temporary, metadata={_METADATA_KEY: info.model_dump_json()})


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
    if "lift" in tensors:
        return HeadProjection(**tensors).apply(lm_head), info
    return HeadFactors(**tensors), info


def _shorten(norms: Sequence[float]) -> str:
    return ", ".join(f"{norm:.3f}" for norm in norms[:3])


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
    factors, _ = load_factors(path, lm_head)
    return join_factors(lm_head, factors, shortlist, source=path)


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
