"""A kernel chooses and lays out to the bit what a chain of torch's operations does."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="needs Triton")
with pytest.MonkeyPatch.context() as environment:
    if DEVICE == "cpu":
        environment.setenv("TRITON_INTERPRET", "1")
    import sgl_eagle_kernels.draft_mail._triton as kernels
if DEVICE == "cpu" and not hasattr(kernels.tl.max, "rewrite"):
    pytest.skip("Triton was imported before, without its interpreter", allow_module_level=True)

from sgl_eagle.plugin.device_trees import write_trees  # noqa: E402
from sgl_eagle.plugin.draft_segment import DraftBuffers, choose_frontier  # noqa: E402
from sgl_eagle.plugin.verify_input import TreeTensors  # noqa: E402

LONGEST = 20


class Round(NamedTuple):
    """R requests, T branches, S levels, K children that the policy takes."""

    num_rows: int
    branches: int
    num_steps: int
    topk: int


ROUNDS = [
    *(Round(1, 1, 1, 1), Round(1, 4, 5, 4), Round(3, 3, 4, 2), Round(2, 3, 1, 3)),
    *(Round(2, 8, 3, 8), Round(5, 4, 2, 1), Round(2, 5, 3, 3)),
]


def make_buffers(shape, seed):
    """Few distinct probabilities, some of none: whole branches, and any child."""
    rng = np.random.default_rng(seed)
    buffers = DraftBuffers.allocate(
        num_rows=shape.num_rows,
        branches=shape.branches,
        topk=shape.topk,
        num_steps=shape.num_steps,
        hidden=(2, torch.float32, DEVICE),
    )
    buffers.seq_lens.copy_(torch.from_numpy(rng.integers(1, LONGEST, shape.num_rows)))
    layout, mail = buffers.layout, buffers.mail
    mail.copy_(torch.from_numpy(rng.integers(0, 99, tuple(mail.shape))))
    layout.frontiers(mail).fill_(-1)
    buffers.widths.copy_(torch.from_numpy(rng.integers(0, shape.branches + 1, shape.num_rows)))
    if rng.random() < 0.5:
        buffers.widths.fill_(shape.branches)
    for index in range(shape.num_steps):
        log_probs = -rng.integers(0, 4, (shape.num_rows, shape.branches, shape.branches)) / 3
        log_probs = log_probs.astype(np.float32)
        for value in (-np.inf, np.nan, np.inf):
            log_probs[rng.random(log_probs.shape) < 0.02] = value
        layout.level(mail, index)[:, 1].copy_(torch.from_numpy(log_probs.view(np.int32)))
    return buffers


def copy(buffers):
    tensors = [field.name for field in fields(buffers) if field.name not in {"layout", "topk"}]
    return replace(buffers, **{name: getattr(buffers, name).clone() for name in tensors})


def choose_by_kernel(buffers, step):
    kernels.choose_frontier(
        buffers.mail,
        buffers.paths,
        buffers.widths,
        buffers.choice,
        buffers.layout.num_steps,
        buffers.topk,
        step,
    )


@pytest.mark.parametrize("shape", ROUNDS, ids=str)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_a_round_of_kernels_is_a_round_of_operations(shape, seed, data):
    with pytest.MonkeyPatch.context() as monkeypatch:
        if DEVICE == "cpu":  # the first call of a kernel compiles its source again
            monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(DraftBuffers, "fit_kernels", False)
        launched = make_buffers(shape, seed)
        for step in range(shape.num_steps - 1):
            wanted = copy(launched)
            choose_frontier(wanted, step)
            choose_by_kernel(launched, step)
            for name in ("mail", "paths", "choice"):
                found = getattr(launched, name)
                assert found.tolist() == getattr(wanted, name).tolist(), name
        num_draft_tokens = data.draw(st.integers(2, 26), label="num_draft_tokens")
        shows_prefix = data.draw(st.booleans(), label="shows_prefix")
        size = shape.num_rows * num_draft_tokens * (LONGEST + num_draft_tokens)
        dtype = data.draw(st.sampled_from([torch.uint8, torch.bool]), label="dtype")
        found, wanted = (
            TreeTensors(
                numbers=torch.full((5, shape.num_rows, num_draft_tokens), 7, device=DEVICE),
                mask=torch.zeros(size, dtype=dtype, device=DEVICE),
            )
            for _ in range(2)
        )
        write_trees(launched, wanted, shows_prefix=shows_prefix)
        kernels.write_trees(
            launched.mail,
            launched.seq_lens,
            found.numbers,
            found.mask,
            shape.num_steps,
            shape.topk,
            shape.branches,
            shows_prefix,
        )
        assert found.numbers.tolist() == wanted.numbers.tolist()
        assert found.mask.tolist() == wanted.mask.tolist()
