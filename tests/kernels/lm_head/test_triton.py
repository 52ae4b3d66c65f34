"""The kernels against the reference, on a GPU or under Triton's interpreter."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="needs Triton")
with pytest.MonkeyPatch.context() as environment:
    if DEVICE == "cpu":
        environment.setenv("TRITON_INTERPRET", "1")
    import sgl_eagle_kernels.lm_head._triton as kernels
if DEVICE == "cpu" and not hasattr(kernels.tl.max, "rewrite"):
    pytest.skip("Triton was imported before, without its interpreter", allow_module_level=True)

from sgl_eagle_kernels.lm_head import (  # noqa: E402
    GlobalTop,
    LocalTop,
    build_two_stage_head,
    reference,
)

# The interpreter computes with NumPy, which warns where NaN and infinity meet.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

# The interpreter multiplies bfloat16 matrices as if they held integers.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]

SHORTLISTS = [
    GlobalTop(num_candidates=20),
    LocalTop(tile_size=16, per_tile=2),
    LocalTop(tile_size=50, per_tile=3, shuffle_seed=None),
    LocalTop(tile_size=100, per_tile=5, shuffle_seed=2),
]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    # The first call of a kernel compiles its source again.
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan(monkeypatch):
    # An output that a kernel leaves unwritten must not look right by chance.
    empty = torch.empty

    def filled(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        if tensor.is_floating_point():
            return tensor.fill_(torch.nan)
        return tensor.fill_(torch.iinfo(tensor.dtype).max if tensor.dtype != torch.bool else True)

    monkeypatch.setattr(kernels.torch, "empty", filled)


def whole_numbers(num_rows, hidden=37, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, (num_rows, hidden), generator=generator).float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shortlist", SHORTLISTS, ids=str)
@pytest.mark.parametrize(("num_rows", "rank"), [(1, 11), (3, 1), (17, 33)])
def test_whole_numbers_agree_exactly(head_maker, shortlist, num_rows, rank, dtype):
    # Sums of small whole numbers are exact in any order; ties abound.
    head = head_maker(shortlist, exact=True, rank=rank, dtype=dtype, device=DEVICE)
    x = whole_numbers(num_rows).to(DEVICE, dtype)
    low = torch.nn.functional.linear(x, head.down)
    assert float(low.abs().max()) <= 256  # exact in bfloat16 as well
    # The reference in float32: half precision would round its logits, which kernels do not.
    exact = build_like(head, torch.float32)
    expected = reference.two_stage_topk(x.float(), exact, 4)
    found = kernels.two_stage_topk(x, head, 4)
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.is_finite, expected.is_finite)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.log_normalizer, expected.log_normalizer, rtol=1e-5, atol=1e-5)
    if isinstance(shortlist, LocalTop):
        wanted = reference.choose_candidates(x.float(), exact)
        chosen, mass = kernels.launch_local(low, head, shortlist)
        assert torch.equal(chosen, wanted.ids)
        torch.testing.assert_close(
            mass.logsumexp(-1), wanted.dropped_log_mass, rtol=1e-5, atol=1e-4
        )


def build_like(head, dtype):
    natural = head.up if head.ids is None else head.up[head.ids.argsort()]
    return build_two_stage_head(
        head.weight.to(dtype), natural.to(dtype), head.down.to(dtype), head.shortlist
    )


@pytest.mark.parametrize("shortlist", SHORTLISTS, ids=str)
def test_real_numbers_agree(head_maker, shortlist):
    head = head_maker(shortlist, rank=20, device=DEVICE)
    x = torch.randn(5, 37, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    found = kernels.two_stage_topk(x, head, 4)
    expected = reference.two_stage_topk(x, head, 4)
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shortlist", SHORTLISTS, ids=str)
@pytest.mark.parametrize("value", [-3.0, 0.0, 3.0])
def test_tied_rows_give_the_lowest_ids(shortlist, value):
    weight = torch.full((203, 8), value, device=DEVICE)
    head = build_two_stage_head(weight, weight[:, :1], torch.ones(1, 8, device=DEVICE), shortlist)
    x = torch.ones(2, 8, device=DEVICE)
    found, expected = (f(x, head, 4) for f in (kernels.two_stage_topk, reference.two_stage_topk))
    assert torch.equal(found.ids, expected.ids)
    assert found.ids[0, 0] == 0
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shortlist", SHORTLISTS, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_are_flagged(head_maker, shortlist, bad):
    head = head_maker(shortlist, exact=True, device=DEVICE)
    x = whole_numbers(3).to(DEVICE)
    clean = kernels.two_stage_topk(x, head, 4)
    x[1, 5] = bad
    found = kernels.two_stage_topk(x, head, 4)
    assert found.is_finite.tolist() == [True, False, True]
    assert found.ids[1].tolist() == [0, 1, 2, 3]
    assert found.log_probs[1].tolist() == [-torch.inf] * 4
    for row in (0, 2):
        assert torch.equal(found.ids[row], clean.ids[row])
        assert torch.equal(found.log_probs[row], clean.log_probs[row])


def test_padding_of_the_last_tile_never_wins(head_maker):
    head = head_maker(LocalTop(tile_size=100, per_tile=5), exact=True, device=DEVICE)
    x = torch.full((2, 37), -1.0, device=DEVICE)
    found = kernels.two_stage_topk(x, head, 13)
    assert torch.equal(found.ids, reference.two_stage_topk(x, head, 13).ids)
    assert all(len(set(row)) == 13 for row in found.ids.tolist())


def test_padding_rows_of_the_full_head_are_never_read(head_maker):
    head = head_maker(LocalTop(tile_size=16, per_tile=2), exact=True, device=DEVICE)
    padded = torch.cat([head.weight, torch.full((21, 37), torch.nan, device=DEVICE)])
    natural = head.up[head.ids.argsort()]
    again = build_two_stage_head(padded, natural, head.down, head.shortlist)
    x = whole_numbers(3).to(DEVICE)
    found, expected = (kernels.two_stage_topk(x, h, 4) for h in (again, head))
    assert torch.equal(found.log_probs, expected.log_probs)


@pytest.mark.gpu
@pytest.mark.parametrize("shortlist", [LocalTop(tile_size=128, per_tile=1), SHORTLISTS[0]], ids=str)
@pytest.mark.parametrize("num_rows", [1, 64, 1024])
def test_a_graph_replays_to_the_same_bits(head_maker, shortlist, num_rows):
    from sgl_eagle_kernels.lm_head import rank_tokens

    head = head_maker(
        shortlist, num_tokens=5003, hidden=264, rank=64, dtype=torch.bfloat16, device="cuda"
    )
    x = torch.randn(num_rows, 264, device="cuda").bfloat16()
    expected = rank_tokens(x, head, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rank_tokens(x, head, 8)
    for _ in range(2):
        graph.replay()
        for found, wanted in zip(captured, expected, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.gpu
def test_heads_of_more_than_two_billion_elements_are_addressed():
    num_tokens, hidden = 262_144, 8200
    weight = torch.zeros(num_tokens, hidden, dtype=torch.bfloat16, device="cuda")
    weight[-1] = 1
    up = torch.zeros(num_tokens, 16, dtype=torch.bfloat16, device="cuda")
    up[-1] = 1
    down = torch.ones(16, hidden, dtype=torch.bfloat16, device="cuda") / hidden
    head = build_two_stage_head(weight, up, down, GlobalTop(num_candidates=64))
    x = torch.ones(2, hidden, dtype=torch.bfloat16, device="cuda")
    assert kernels.two_stage_topk(x, head, 1).ids.tolist() == [[num_tokens - 1]] * 2
