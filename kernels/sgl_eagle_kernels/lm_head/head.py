"""The two-stage head: a low-rank head ranks the vocabulary, the full head scores a shortlist.

Letters: N rows, V tokens, H hidden size, R rank, C candidates, K `topk`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_eagle_kernels.lm_head.shuffle import shuffle_vocabulary
from sgl_eagle_kernels.packed_linear import (
    PackedWeight,
    has_int8_products,
    pack_int8,
    pack_weight,
    quantize_rows,
)

MAX_TOPK = 32
MAX_CANDIDATES = 4096
"""The last kernel of stage 2 holds all candidates of a row on chip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalTop:
    """The exact best tokens of the low-rank head.

    Attributes:
        num_candidates: C.
    """

    num_candidates: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_candidates <= MAX_CANDIDATES:
            raise ValueError(
                f"num_candidates must be in [1, {MAX_CANDIDATES}], got {self.num_candidates}"
            )

    def count(self, num_tokens: int) -> int:
        """Candidates of a row.

        Args:
            num_tokens: V.

        Returns:
            C, padding included; at most V.
        """
        return min(self.num_candidates, num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTop:
    """The best tokens of every tile of the vocabulary, so that no score leaves the chip.

    Likely tokens often have neighbouring ids, and would then crowd one tile out; a shuffle spreads
    them.

    Attributes:
        tile_size: Tokens in one tile.
        per_tile: Candidates of one tile.
        shuffle_seed: Seed of the order of the vocabulary; None keeps the natural order.
    """

    tile_size: int
    per_tile: int
    shuffle_seed: int | None = 0

    def __post_init__(self) -> None:
        if self.tile_size < 1:
            raise ValueError(f"tile_size must be at least 1, got {self.tile_size}")
        if not 1 <= self.per_tile <= min(self.tile_size, MAX_TOPK):
            raise ValueError(
                f"per_tile must be in [1, min(tile_size, {MAX_TOPK})], got {self.per_tile} of "
                f"tile_size={self.tile_size}"
            )

    def count(self, num_tokens: int) -> int:
        """Candidates of a row.

        Args:
            num_tokens: V.

        Returns:
            C, padding of the last tile included.
        """
        return -(-num_tokens // self.tile_size) * self.per_tile


Shortlist = GlobalTop | LocalTop
"""How stage 1 chooses candidates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoStageHead:
    """Weights of both stages, made by `build_two_stage_head`.

    Attributes:
        weight: [>= V, H] rows of the full head by token id, contiguous along H; rows from V on are
            padding and never read.
        up: [V, R] contiguous; row j is the low-rank row of token `ids[j]`. In the dtype of the
            others, or int8 with `up_scale`.
        down: [R, H] contiguous.
        ids: [V] int64 token of each row of `up`, ascending within a tile; None where row j is
            token j.
        shortlist: How candidates are chosen.
        up_scale: [V] float32 factor of each row of an int8 `up`; None where `up` is not int8.
        packed_up: `up` in the layout that CPUs multiply fastest, None where there is none.
        packed_down: The same of `down`.
    """

    weight: Tensor
    up: Tensor
    down: Tensor
    ids: Tensor | None
    shortlist: Shortlist
    up_scale: Tensor | None = None
    packed_up: PackedWeight | None = None
    packed_down: PackedWeight | None = None

    @property
    def num_tokens(self) -> int:
        """V."""
        return self.up.shape[0]

    @property
    def num_candidates(self) -> int:
        """C, padding included."""
        return self.shortlist.count(self.num_tokens)

    @property
    def most_topk(self) -> int:
        """Tokens that stage 2 always has to choose from, up to `MAX_TOPK`."""
        available = self.num_candidates
        if isinstance(self.shortlist, LocalTop):
            tail = self.num_tokens % self.shortlist.tile_size or self.shortlist.tile_size
            available -= max(self.shortlist.per_tile - tail, 0)
        return min(available, MAX_TOPK)


class HeadTopk(NamedTuple):
    """The best tokens of every row.

    Attributes:
        log_probs: [N, K] float32, natural logs, descending; minus infinity in rows that are not
            finite.
        ids: [N, K] int64 in [0, V), distinct where the log-probabilities are finite; equal logits
            come in ascending order of id.
        log_normalizer: [N] float32: logit minus this is a log-probability over the whole
            vocabulary. Shards of a vocabulary are joined with it.
        is_finite: [N] bool, False where a score was NaN or plus infinity, or all were minus
            infinity; the ids are then 0 to K - 1.
    """

    log_probs: Tensor
    ids: Tensor
    log_normalizer: Tensor
    is_finite: Tensor


def build_two_stage_head(
    weight: Tensor, up: Tensor, down: Tensor, shortlist: Shortlist, *, quantize: bool = False
) -> TwoStageHead:
    """Join the full head with its factors; the vocabulary is shuffled here if that is wanted.

    Args:
        weight: [>= V, H] full head, shared, not copied.
        up: [V, R] in the order of the token ids.
        down: [R, H].
        shortlist: How candidates are chosen.
        quantize: Keep `up` as int8, which halves what stage 1 reads.

    Returns:
        The head; the order of `weight` and of token ids is untouched.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit, or there are too many candidates.
    """
    _check_weights(weight, up, down)
    candidates = shortlist.count(up.shape[0])
    if candidates > MAX_CANDIDATES:
        raise ValueError(
            f"{shortlist} makes {candidates} candidates of {up.shape[0]} tokens, at most "
            f"{MAX_CANDIDATES} are allowed: use larger tiles or a smaller per_tile"
        )
    ids = None
    if isinstance(shortlist, LocalTop) and shortlist.shuffle_seed is not None:
        ids = shuffle_vocabulary(up.shape[0], shortlist.tile_size, shortlist.shuffle_seed)
        ids = ids.to(up.device)
        up = up[ids]
    packed_up: PackedWeight | None = pack_weight(up)
    up_scale = None
    if quantize:
        packed_up = pack_int8(up) if has_int8_products(up.dtype, up.device) else None
        up, up_scale = quantize_rows(up)
    up = up.contiguous()
    return TwoStageHead(
        weight=weight,
        up=up,
        down=down.contiguous(),
        ids=ids,
        shortlist=shortlist,
        up_scale=up_scale,
        packed_up=packed_up,
        packed_down=pack_weight(down),
    )


def _check_weights(weight: Tensor, up: Tensor, down: Tensor) -> None:
    shapes = {"weight": weight, "up": up, "down": down}
    described = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in shapes.items())
    flat = all(tensor.dim() == 2 for tensor in shapes.values())  # noqa: PLR2004 (matrices)
    if not (
        flat
        and 1 <= up.shape[0] <= weight.shape[0]
        and up.shape[1] == down.shape[0] >= 1
        and down.shape[1] == weight.shape[1]
    ):
        raise ValueError(
            f"shapes must be weight [>= V, H], up [V, R], down [R, H], got {described}"
        )
    dtypes = {tensor.dtype for tensor in shapes.values()}
    if len(dtypes) > 1 or dtypes - {torch.bfloat16, torch.float16, torch.float32}:
        raise ValueError(f"weights must share bfloat16, float16 or float32, got {dtypes}")
    if len({tensor.device for tensor in shapes.values()}) > 1:
        raise ValueError("weight, up and down must be on one device")
    if weight.stride(1) != 1:
        raise ValueError(f"weight must be contiguous along H, got strides {weight.stride()}")
