"""Packed weights give the products of ordinary ones."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from torch.nn import functional  # noqa: E402

from sgl_eagle_kernels.packed_linear import pack_weight, packed_linear  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 2), (65,), (0,)], ids=str)
def test_product_is_that_of_the_ordinary_weight(dtype, shape):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(37, 21, generator=generator).to(dtype)
    x = torch.randn(*shape, 42, generator=generator).to(dtype)[..., ::2]
    bias = torch.randn(37, generator=generator).to(dtype)
    for added in (None, bias):
        found = packed_linear(x, weight, pack_weight(weight), added)
        assert found.dtype == dtype
        # In float32: torch rounds some products before it adds the bias, and some after.
        exact = functional.linear(
            x.float(), weight.float(), None if added is None else added.float()
        )
        torch.testing.assert_close(found, exact.to(dtype))


def test_only_half_precision_on_a_cpu_is_packed():
    weight = torch.ones(4, 3)
    assert pack_weight(weight) is None
    assert pack_weight(weight.to("meta", torch.bfloat16)) is None
    if torch.backends.mkldnn.is_available():
        assert pack_weight(weight.bfloat16()) is not None
