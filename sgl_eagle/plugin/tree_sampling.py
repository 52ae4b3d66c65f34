"""Sampling verification in plain torch, where SGLang would verify greedily or ignore a filter.

The target-only rule: at every node of the accepted path the target draws its own token; the walk
goes on where a child of the node holds that token. What is drawn does not depend on the tree, so
all nodes may draw at once and the walk may follow (`harness/README.md` proves the rest).
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw_tokens(
    logits: Tensor, *, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> Tensor:
    """Draw one token for every row, as SGLang's sampler for plain decoding does.

    The three filters look at the same distribution: a token stays if it is among the top k, if the
    tokens before it hold at most p, and if its probability is at least `min_p` of the greatest.

    Args:
        logits: [R, V] target logits, penalties and masks applied.
        temperatures: [R] float, above 0.
        top_ks: [R] int, at least 1; 1 is greedy.
        top_ps: [R] float in (0, 1].
        min_ps: [R] float in [0, 1].

    Returns:
        [R] int64 token ids.
    """
    probs = (logits.float() / temperatures[:, None]).softmax(-1)
    probs, ids = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    kept = ranks < top_ks[:, None]
    kept &= probs.cumsum(-1) - probs <= top_ps[:, None]
    kept &= probs >= probs[:, :1] * min_ps[:, None]
    # The first rank is always kept: rounding must not leave a row without a token.
    kept[:, 0] = True
    drawn = torch.multinomial(probs * kept, num_samples=1)
    return ids.gather(1, drawn)[:, 0]
