"""Choosing the target's token: greedy, or sampled with the randomness of a position, not of a step.

The uniform number that picks the token at index i of the completion depends on (seed, i) alone. So
for one seed every policy emits the very text that plain decoding emits, as at temperature 0, and a
text recorded at temperature 1 can be replayed exactly.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from sgl_eagle.reference.sampling_config import Sampling


def target_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that the target samples from.

    Args:
        logits: [..., V].
        sampling: With temperature above 0.

    Returns:
        [..., V] float64, summing to 1.
    """
    probs = torch.softmax(logits.double() / sampling.temperature, dim=-1)
    if not sampling.top_k and sampling.top_p == 1.0:
        return probs
    if sampling.top_k:
        floor = probs.topk(min(sampling.top_k, probs.shape[-1]), dim=-1).values[..., -1:]
        probs = probs.where(probs >= floor, 0.0)
    if sampling.top_p < 1.0:
        descending, order = probs.sort(dim=-1, descending=True, stable=True)
        before = descending.cumsum(dim=-1) - descending
        total = descending.sum(dim=-1, keepdim=True)
        kept = descending.where(before < sampling.top_p * total, 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, kept)
    return probs / probs.sum(dim=-1, keepdim=True)


def choose_token(logits: Tensor, sampling: Sampling, index: int) -> int:
    """The target's token at one index of the completion.

    Args:
        logits: [V].
        sampling: Greedy breaks ties to the lowest id.
        index: Index in the completion; with the seed it fixes the uniform number.

    Returns:
        Token id.
    """
    if sampling.temperature == 0.0:
        return int(logits.float().argmax())
    cumulative = target_probs(logits, sampling).cumsum(dim=-1)
    threshold = uniform_at(sampling.seed, index) * float(cumulative[-1])
    token = int(torch.searchsorted(cumulative, threshold, right=True))
    return min(token, cumulative.shape[0] - 1)


def uniform_at(seed: int, index: int) -> float:
    """The uniform number of one index of the completion.

    A hash, since a generator that is seeded for one number costs more than the whole choice.

    Args:
        seed: Of the request.
        index: Index in the completion.

    Returns:
        In [0, 1), a multiple of 2^-53.
    """
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
