"""One integer that orders tokens by score and settles ties: the rule all stages share.

Higher keys are higher scores, then lower ids. Keys of different tokens differ, so any correct
selection gives the same result.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_32 = 0xFFFFFFFF


def rank_keys(scores: Tensor, ids: Tensor) -> Tensor:
    """Sortable keys of scores.

    Args:
        scores: [...] float32; NaN ranks with minus infinity, and -0.0 with 0.0.
        ids: Integers below 2^32 that broadcast against it.

    Returns:
        [...] int64; the low 32 bits are the complement of the id.
    """
    # Adding zero turns -0.0 into 0.0; bit patterns of negative floats fall as the floats rise.
    bits = (scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0).view(
        torch.int32
    )
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (_LOW_32 - ids.long())


def key_ids(keys: Tensor) -> Tensor:
    """Ids back from keys.

    Args:
        keys: [...] int64 from `rank_keys`.

    Returns:
        [...] int64.
    """
    return _LOW_32 - (keys & _LOW_32)


def key_scores(keys: Tensor) -> Tensor:
    """Scores back from keys.

    Args:
        keys: [...] int64 from `rank_keys`.

    Returns:
        [...] float32.
    """
    ordered = (keys >> 32).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
