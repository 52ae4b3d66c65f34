"""The path of CPUs gives what the reference gives."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from sgl_eagle_kernels.lm_head import GlobalTop, LocalTop, build_two_stage_head, cpu  # noqa: E402
from sgl_eagle_kernels.lm_head.reference import two_stage_topk  # noqa: E402

SHORTLISTS = [
    GlobalTop(num_candidates=20),
    LocalTop(tile_size=16, per_tile=2),
    LocalTop(tile_size=16, per_tile=1),
    LocalTop(tile_size=7, per_tile=1, shuffle_seed=None),
]


@pytest.mark.parametrize("shortlist", SHORTLISTS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 5])
def test_tokens_are_equal_and_probabilities_agree(head_maker, shortlist, num_rows):
    # Small whole numbers: no sum is rounded, and many scores and logits tie.
    head = head_maker(shortlist, exact=True, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-1, 2, (num_rows, 37), generator=generator).bfloat16()
    found, expected = cpu.two_stage_topk(x, head, 4), two_stage_topk(x, head, 4)
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.is_finite, expected.is_finite)
    assert found.ids.dtype == torch.int64
    assert found.log_probs.dtype == found.log_normalizer.dtype == torch.float32
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=2e-5)
    torch.testing.assert_close(found.log_normalizer, expected.log_normalizer, rtol=0, atol=2e-5)


@pytest.mark.parametrize("shortlist", SHORTLISTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_quantised_first_stage_ranks_by_rounded_scores(head_maker, shortlist, dtype):
    plain = head_maker(shortlist, rank=16, exact=True, dtype=dtype)
    natural = plain.up if plain.ids is None else torch.empty_like(plain.up)
    if plain.ids is not None:
        natural[plain.ids] = plain.up
    head = build_two_stage_head(plain.weight, natural, plain.down, shortlist, quantize=True)
    assert (head.packed_up is not None) == (dtype == torch.bfloat16)
    x = torch.randn(5, 37, generator=torch.Generator().manual_seed(3)).to(dtype)
    found, expected = cpu.two_stage_topk(x, head, 1), two_stage_topk(x, head, 1)
    # Scores are rounded to the dtype, and decide candidates only where they are all but equal.
    assert (found.ids == expected.ids).float().mean() >= 0.8
    torch.testing.assert_close(found.log_normalizer, expected.log_normalizer, rtol=1e-2, atol=0)


def test_a_token_without_any_chance_is_never_chosen(head_maker):
    head = head_maker(LocalTop(tile_size=7, per_tile=1, shuffle_seed=None), rank=1)
    head.up[:7] = -torch.inf
    head.down[:] = 1.0
    x = torch.ones(1, 37)
    head.weight[:7] = 100.0
    found, expected = cpu.two_stage_topk(x, head, 4), two_stage_topk(x, head, 4)
    assert torch.equal(found.ids, expected.ids)
    assert (found.ids >= 7).all()
