"""Packed weights give the products of ordinary ones, or of ones rounded to eight bits."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from torch.nn import functional  # noqa: E402

import sgl_eagle_kernels.packed_linear as packed_module  # noqa: E402
from sgl_eagle_kernels.packed_linear import (  # noqa: E402
    has_int8_products,
    pack_int8,
    pack_weight,
    packed_linear,
    quantize_rows,
)


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


@pytest.fixture(params=["rounded inputs", "inputs as they are"])
def inputs_are_rounded(request, monkeypatch):
    """Products of CPUs with VNNI, and of others."""
    rounded = request.param == "rounded inputs"
    if rounded and not packed_module.rounds_inputs():
        pytest.skip("needs a CPU with VNNI")
    monkeypatch.setattr(packed_module, "rounds_inputs", lambda: rounded)
    return rounded


@pytest.mark.parametrize("shape", [(1,), (3, 2), (65,)], ids=str)
def test_product_with_eight_bits_is_that_of_the_rounded_weight(shape, inputs_are_rounded):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(37, 48, generator=generator).bfloat16()
    x = torch.randn(*shape, 96, generator=generator).bfloat16()[..., ::2]
    bias = torch.randn(37, generator=generator).bfloat16()
    steps, scale = quantize_rows(weight)
    wide = x.float()
    if inputs_are_rounded:
        step = wide.abs().amax(dim=-1, keepdim=True) / 127
        wide = (wide / step).round() * step
    exact = functional.linear(wide, steps.float() * scale[:, None])
    found = packed_linear(x, weight, pack_int8(weight))
    torch.testing.assert_close(found, exact.bfloat16())
    torch.testing.assert_close(packed_linear(x, weight, pack_int8(weight), bias), found + bias)


@pytest.mark.usefixtures("inputs_are_rounded")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_only_inputs_that_are_not_finite_give_products_that_are_not(bad):
    weight = torch.randn(37, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = torch.ones(3, 16).bfloat16()
    x[1, 2], x[2] = bad, 0.0
    found = packed_linear(x, weight, pack_int8(weight))
    assert found.isfinite().all(dim=1).tolist() == [True, False, True]
    assert not found[1].isfinite().any()
    assert (found[2] == 0).all()


def test_eight_bits_are_off_by_half_a_step_and_scales_lose_nothing_in_bfloat16():
    weight = torch.randn(41, 29, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[3] = 0.0
    steps, scale = quantize_rows(weight)
    assert steps.dtype == torch.int8
    assert torch.equal(scale, scale.bfloat16().float())
    # Rounding of the scale may clip the largest entry of a row by 127 roundings of bfloat16.
    error = (steps.float() * scale[:, None] - weight.float()).abs()
    assert (error <= scale[:, None] * (0.5 + 127 / 256)).all()
    assert (error > scale[:, None] * 0.5).sum() <= len(weight)


@pytest.mark.usefixtures("inputs_are_rounded")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_stays_so_in_eight_bits(bad):
    weight = torch.ones(3, 16).bfloat16()
    weight[1, 2] = bad
    found = packed_linear(torch.ones(1, 16).bfloat16(), weight, pack_int8(weight))
    assert found.isfinite().tolist() == [[True, False, True]]


def test_rows_that_torch_cannot_read_in_eight_bits_are_packed_as_they_are():
    weight = torch.randn(5, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = torch.ones(2, 24).bfloat16()
    exact = functional.linear(x.float(), weight.float()).bfloat16()
    torch.testing.assert_close(packed_linear(x, weight, pack_int8(weight)), exact)


def test_only_bfloat16_on_a_cpu_is_rounded():
    cpu = torch.device("cpu")
    assert has_int8_products(torch.bfloat16, cpu)
    assert not has_int8_products(torch.float16, cpu)
    assert not has_int8_products(torch.float32, cpu)
    assert not has_int8_products(torch.bfloat16, torch.device("cuda"))
