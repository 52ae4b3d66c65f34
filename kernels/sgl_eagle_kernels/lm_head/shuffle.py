"""The order in which the vocabulary is cut into tiles, and what a cut costs in recall."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def shuffle_vocabulary(num_tokens: int, tile_size: int, seed: int) -> Tensor:
    """A random partition of the vocabulary into tiles.

    Args:
        num_tokens: V.
        tile_size: Tokens in one tile; the last tile has the rest.
        seed: The same seed gives the same order on every machine.

    Returns:
        [V] int64 token ids in the order of the tiles, ascending within each, so that the first of
        two equal scores in a tile is that of the lower id.
    """
    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(seed))
    tiles = order.split(tile_size)
    return torch.cat([tile.sort().values for tile in tiles])


def expected_recall(num_tokens: int, topk: int, num_tiles: int, per_tile: int) -> float:
    """Share of the best `topk` tokens that local top-k keeps, over random partitions.

    A tile of V / T tokens holds r of the best K with hypergeometric probability, and loses all but
    `per_tile` of them.

    Source: arXiv 2506.04165: 1 - (T / K) sum_{r > k} (r - k) C(K, r) C(V - K, V/T - r) / C(V, V/T).

    Args:
        num_tokens: V, a multiple of `num_tiles`.
        topk: K, tokens that one wants to keep.
        num_tiles: T.
        per_tile: k, candidates of one tile.

    Returns:
        In [0, 1].

    Raises:
        ValueError: If a tile would not be whole or a count is out of range.
    """
    if num_tokens % num_tiles or not 1 <= topk <= num_tokens or per_tile < 1:
        raise ValueError(
            f"num_tokens must be a multiple of num_tiles, topk in [1, num_tokens], per_tile at "
            f"least 1, got {num_tokens=}, {num_tiles=}, {topk=}, {per_tile=}"
        )
    tile_size = num_tokens // num_tiles
    all_tiles = _log_choose(num_tokens, tile_size)
    lost = 0.0
    for held in range(per_tile + 1, min(topk, tile_size) + 1):
        if tile_size - held <= num_tokens - topk:
            log_share = _log_choose(topk, held) + _log_choose(num_tokens - topk, tile_size - held)
            lost += (held - per_tile) * math.exp(log_share - all_tiles)
    return 1.0 - num_tiles * lost / topk


def _log_choose(total: int, chosen: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)
