"""Heads with awkward shapes, shared by the tests of the reference and of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sgl_eagle_kernels.lm_head import Shortlist, TwoStageHead

# Triton's own functions are made at its import, to be interpreted or not. Left set, the variable
# would reach the servers that other tests start.
with suppress(ModuleNotFoundError), pytest.MonkeyPatch.context() as environment:
    import torch

    if not torch.cuda.is_available():
        environment.setenv("TRITON_INTERPRET", "1")
    import triton.language  # noqa: F401


def make_head(
    shortlist: Shortlist,
    *,
    num_tokens: int = 203,
    hidden: int = 37,
    rank: int = 11,
    exact: bool = False,
    seed: int = 0,
    **placement: Any,
) -> TwoStageHead:
    """A head whose low-rank part is the best of its rank; `exact` has small whole numbers only."""
    import torch

    from sgl_eagle_kernels.lm_head import build_two_stage_head

    generator = torch.Generator().manual_seed(seed)
    if exact:
        up = torch.randint(-2, 3, (num_tokens, rank), generator=generator).float()
        down = torch.randint(-1, 2, (rank, hidden), generator=generator).float()
        weight = up @ down + torch.randint(-1, 2, (num_tokens, hidden), generator=generator)
    else:
        weight = torch.randn(num_tokens, hidden, generator=generator)
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        up, down = left[:, :rank] * values[:rank], right[:rank]
    up, down, weight = (tensor.to(**placement) for tensor in (up, down, weight))
    return build_two_stage_head(weight, up, down, shortlist)


@pytest.fixture(scope="session")
def head_maker() -> Callable[..., TwoStageHead]:
    return make_head
