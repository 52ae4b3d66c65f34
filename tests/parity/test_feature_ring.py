"""The kernel keeps, and leaves alone, what torch's indexing does."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="needs Triton")
with pytest.MonkeyPatch.context() as environment:
    if DEVICE == "cpu":
        environment.setenv("TRITON_INTERPRET", "1")
    import sgl_eagle_kernels.feature_ring._triton as kernels
if DEVICE == "cpu" and not hasattr(kernels.tl.max, "rewrite"):
    pytest.skip("Triton was imported before, without its interpreter", allow_module_level=True)

from sgl_eagle_kernels.feature_ring import keep_round, keep_round_reference  # noqa: E402

NUM_ROWS = 7


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    # The first call of a kernel compiles its source again.
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("token_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("num_requests", "window", "num_features"), [(1, 1, 1), (3, 5, 37), (7, 16, 2050)], ids=str
)
def test_the_kernel_keeps_a_round(num_requests, window, num_features, token_dtype, dtype):
    generator = torch.Generator().manual_seed(num_requests)
    tokens = torch.randint(1 << 20, (num_requests,), generator=generator).to(DEVICE, token_dtype)
    # Rows of a wider tensor, as of a batch that was padded.
    wide = torch.randn(num_requests, num_features + 3, generator=generator).to(DEVICE, dtype)
    rows = torch.randperm(NUM_ROWS, generator=generator)[:num_requests].to(DEVICE)
    positions = torch.randint(1 << 12, (num_requests,), generator=generator).to(DEVICE)
    kept = [
        (
            torch.full((NUM_ROWS, window), -1, device=DEVICE),
            torch.full((NUM_ROWS, window, num_features), torch.nan, dtype=dtype, device=DEVICE),
        )
        for _ in range(2)
    ]
    features = wide[:, :num_features]
    kernels.keep_round(tokens, features, rows, positions, *kept[0])
    keep_round_reference(
        tokens,
        features,
        rows=rows,
        positions=positions,
        kept_tokens=kept[1][0],
        kept_features=kept[1][1],
    )
    for found, wanted in zip(*kept, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert (kept[0][0] >= 0).sum() == num_requests


@pytest.mark.parametrize(("size", "dtype"), [(3, torch.float32), (4, torch.bfloat16)])
def test_other_features_are_refused(size, dtype):
    kept = torch.zeros(2, 3, 4)
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"must be \[4\] torch.float32 a request, got"):
        keep_round(
            one,
            torch.zeros(1, size, dtype=dtype),
            rows=one,
            positions=one,
            kept_tokens=torch.zeros(2, 3, dtype=torch.int64),
            kept_features=kept,
        )
