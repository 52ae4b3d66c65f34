"""The kernels against the reference, on a GPU or under Triton's interpreter."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="needs Triton")
with pytest.MonkeyPatch.context() as environment:
    if DEVICE == "cpu":
        environment.setenv("TRITON_INTERPRET", "1")
    import sgl_eagle_kernels.lm_head._triton as kernels
    from sgl_eagle_kernels.lm_head._triton import full as full_kernels
    from sgl_eagle_kernels.lm_head._triton import local as local_kernels
    from sgl_eagle_kernels.lm_head._triton import rank as rank_kernels
    from sgl_eagle_kernels.lm_head._triton import row as row_kernels
    from sgl_eagle_kernels.lm_head._triton import select as select_kernels
    from sgl_eagle_kernels.lm_head._triton import stage2 as stage2_kernels
    from sgl_eagle_kernels.lm_head._triton import stream as stream_kernels
if DEVICE == "cpu" and not hasattr(local_kernels.tl.max, "rewrite"):
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
    LocalTop(tile_size=40, per_tile=1, shuffle_seed=None),
    LocalTop(tile_size=100, per_tile=5, shuffle_seed=2),
]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    # The first call of a kernel compiles its source again.
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _parts_are_small(monkeypatch):
    # A tile of 40 tokens then has three parts, of which the last is not full.
    monkeypatch.setattr(local_kernels, "PART", 16)
    monkeypatch.setattr(stream_kernels, "PLAN", stream_kernels.StreamPlan(tokens=32))
    monkeypatch.setattr(stream_kernels, "MOST_RANK_BLOCK", 64)


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan(monkeypatch):
    # An output that a kernel leaves unwritten must not look right by chance.
    empty = torch.empty

    def filled(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        if tensor.is_floating_point():
            return tensor.fill_(torch.nan)
        return tensor.fill_(torch.iinfo(tensor.dtype).max if tensor.dtype != torch.bool else True)

    monkeypatch.setattr(torch, "empty", filled)


def whole_numbers(num_rows, hidden=37, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, (num_rows, hidden), generator=generator).float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shortlist", SHORTLISTS, ids=str)
@pytest.mark.parametrize(("num_rows", "rank"), [(1, 11), (3, 1), (5, 40), (17, 300)])
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
        chosen, scores, mass = kernels.find_candidates(low, head)
        assert torch.equal(chosen, wanted.ids)
        assert torch.equal(scores, wanted.scores)
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
@pytest.mark.parametrize("num_rows", [2, 9])
def test_what_scores_miss_is_added_to_the_dropped_mass(head_maker, shortlist, num_rows):
    head = head_maker(shortlist, rank=20, device=DEVICE)
    # Small enough for what is dropped to matter.
    x = 0.2 * torch.randn(num_rows, 37, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    x[-1] = torch.nan
    found, expected = (f(x, head, 4) for f in (kernels.two_stage_topk, reference.two_stage_topk))
    assert torch.equal(found.ids, expected.ids)
    assert found.is_finite.tolist() == [True] * (num_rows - 1) + [False]
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-4)
    chosen = reference.choose_candidates(x, head)
    as_it_is = reference.rank_candidates(x, head, chosen._replace(scores=None), 4)
    moved = (found.log_normalizer - as_it_is.log_normalizer)[:-1]
    assert (moved.abs() > 0.01).any()


@pytest.mark.parametrize("shortlist", [SHORTLISTS[0], SHORTLISTS[2]], ids=str)
def test_an_int8_head_agrees(head_maker, shortlist):
    plain = head_maker(shortlist, exact=True)
    natural = plain.up if plain.ids is None else plain.up[plain.ids.argsort()]
    natural[7] = 0  # has no scale to divide by
    weights = (tensor.to(DEVICE) for tensor in (plain.weight, natural, plain.down))
    head = build_two_stage_head(*weights, shortlist, quantize=True)
    assert head.up.dtype == torch.int8
    x = whole_numbers(3).to(DEVICE)
    found, expected = (f(x, head, 4) for f in (kernels.two_stage_topk, reference.two_stage_topk))
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-4)
    head.up_scale[7] = torch.nan
    assert not kernels.two_stage_topk(x, head, 4).is_finite.any()


@pytest.mark.parametrize("num_tokens", [5, 203, 4100])
@pytest.mark.parametrize("kind", ["normal", "tied", "whole", "equal", "infinite", "narrow"])
def test_selection_is_that_of_a_sort(num_tokens, kind):
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(3, num_tokens, generator=generator)
    scores = {
        "normal": scores,
        "tied": scores.round(),
        "whole": (scores * 100).round() - 300,
        "equal": torch.full_like(scores, -0.0),
        "infinite": scores.where(scores > 0.5, -torch.inf),
        "narrow": 1 + scores * 1e-6,
    }[kind].to(DEVICE)
    for count in {1, 5, min(100, num_tokens), min(513, num_tokens)}:
        group_size = select_kernels.choose_group_size(num_tokens, count)
        padded = torch.nn.functional.pad(scores, (0, -num_tokens % group_size), value=-torch.inf)
        groups = padded.view(3, -1, group_size)
        found, chosen, dropped = select_kernels.select_top(
            scores,
            groups.amax(-1),
            groups.logsumexp(-1),
            group_size=group_size,
            count=count,
        )
        keys = reference.rank_keys(scores, torch.arange(num_tokens, device=DEVICE))
        best = keys.topk(count, dim=-1).indices.sort(dim=-1).values
        rest = scores.scatter(1, best, -torch.inf).logsumexp(-1)
        assert torch.equal(found, best.where(scores.gather(1, best) > -torch.inf, -1))
        assert torch.equal(chosen, scores.gather(1, best))
        torch.testing.assert_close(dropped[:, 0], rest, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_tokens", "topk"), [(1, 5, 5), (3, 203, 4), (2, 4100, 8)])
def test_the_full_head_agrees(num_rows, num_tokens, topk, dtype):
    generator = torch.Generator().manual_seed(6)
    weight = torch.randint(-1, 2, (num_tokens, 37), generator=generator).float()
    x = whole_numbers(num_rows)
    expected = reference.full_topk(x, weight, topk)
    found = full_kernels.full_topk(x.to(DEVICE, dtype), weight.to(DEVICE, dtype), topk)
    assert torch.equal(found.ids.cpu(), expected.ids)
    assert found.is_finite.all()
    torch.testing.assert_close(found.log_probs.cpu(), expected.log_probs, rtol=1e-5, atol=1e-5)
    weight[3, 0] = torch.nan
    broken = full_kernels.full_topk(x.to(DEVICE, dtype), weight.to(DEVICE, dtype), topk)
    assert not broken.is_finite.any()
    assert broken.ids.tolist() == [list(range(topk))] * num_rows


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


STREAMED = [
    LocalTop(tile_size=40, per_tile=1, shuffle_seed=None),
    LocalTop(tile_size=64, per_tile=1, shuffle_seed=1),
    LocalTop(tile_size=100, per_tile=1, shuffle_seed=2),
    LocalTop(tile_size=300, per_tile=1, shuffle_seed=None),
    LocalTop(tile_size=100, per_tile=2, shuffle_seed=2),
    LocalTop(tile_size=67, per_tile=2, shuffle_seed=None),
]


@pytest.mark.parametrize("shortlist", STREAMED, ids=str)
@pytest.mark.parametrize(("num_rows", "rank"), [(1, 8), (2, 24), (3, 104), (8, 16)])
def test_streamed_tiles_agree_exactly(head_maker, shortlist, num_rows, rank):
    head = head_maker(shortlist, exact=True, rank=rank, dtype=torch.float16, device=DEVICE)
    x = whole_numbers(num_rows).to(DEVICE, torch.float16)
    low = torch.nn.functional.linear(x, head.down)
    assert stream_kernels.can_stream(low, head)
    exact = build_like(head, torch.float32)
    wanted = reference.choose_candidates(x.float(), exact)
    streamed = [stream_kernels.stream_tiles(low, head)]
    if num_rows == 1:
        assert row_kernels.can_stream_row(low, head)
        row = row_kernels.stream_row(low, head, x)
        assert torch.equal(row.logits, stage2_kernels.gather_dot(x, head.weight, row.ids))
        streamed.append(row[:3])
    for ids, scores, mass in streamed:
        assert torch.equal(ids, wanted.ids)
        assert torch.equal(scores, wanted.scores)
        dropped = mass.logsumexp(-1)
        torch.testing.assert_close(dropped, wanted.dropped_log_mass, rtol=1e-5, atol=1e-4)
    expected = reference.two_stage_topk(x.float(), exact, 1)
    found = kernels.two_stage_topk(x, head, 1)
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize(("tokens", "programs"), [(16, 1), (64, 3)])
def test_a_plan_changes_nothing_but_the_time(head_maker, tokens, programs, num_rows):
    head = head_maker(STREAMED[4], rank=24, dtype=torch.float16, device=DEVICE)
    x = whole_numbers(num_rows).to(DEVICE, torch.float16)
    plan = stream_kernels.StreamPlan(tokens=tokens, programs=programs)
    found, expected = (kernels.two_stage_topk(x, head, 4, cut) for cut in (plan, None))
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tile_size", [1, 256, 257, 1000, 1024])
def test_large_tiles_have_larger_parts_and_as_much_under_way(tile_size):
    plan = stream_kernels.StreamPlan()
    fitted = row_kernels.fit_plan(plan, tile_size)
    assert tile_size <= row_kernels.COLUMNS * fitted.tokens
    assert (fitted == plan) == (tile_size <= row_kernels.COLUMNS * plan.tokens)
    assert fitted.shared_bytes(256) == plan.shared_bytes(256)
    assert fitted.warps * fitted.programs == plan.warps * plan.programs


def test_a_tile_too_large_for_the_chip_is_streamed_without_its_scores(head_maker):
    shortlist = LocalTop(tile_size=1025, per_tile=2, shuffle_seed=2)
    head = head_maker(
        shortlist, num_tokens=1100, exact=True, rank=8, dtype=torch.float16, device=DEVICE
    )
    x = whole_numbers(1).to(DEVICE, torch.float16)
    low = torch.nn.functional.linear(x, head.down)
    assert stream_kernels.can_stream(low, head)
    assert not row_kernels.can_stream_row(low, head)
    found, expected = (f(x, head, 4) for f in (kernels.two_stage_topk, reference.two_stage_topk))
    assert torch.equal(found.ids, expected.ids)


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("value", [-3.0, 0.0, 3.0])
def test_streamed_ties_give_the_lowest_ids(value, num_rows):
    weight = torch.full((203, 8), value, device=DEVICE, dtype=torch.float16)
    down = torch.eye(8, device=DEVICE, dtype=torch.float16)
    head = build_two_stage_head(weight, weight, down, LocalTop(tile_size=40, per_tile=1))
    x = torch.ones(num_rows, 8, device=DEVICE, dtype=torch.float16)
    assert stream_kernels.can_stream(x, head)
    found, expected = (f(x, head, 4) for f in (kernels.two_stage_topk, reference.two_stage_topk))
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["input", "up", "weight"])
def test_streamed_rows_that_are_not_finite_are_flagged(head_maker, where, bad):
    head = head_maker(STREAMED[2], exact=True, rank=16, dtype=torch.float16, device=DEVICE)
    x = whole_numbers(3).to(DEVICE, torch.float16)
    clean = kernels.two_stage_topk(x, head, 2)
    if where == "input":
        x[1, 5] = bad
    elif where == "up":
        head.up[7] = bad
    else:
        head.weight[:] = bad
    found = kernels.two_stage_topk(x, head, 2)
    if where == "input":
        assert found.is_finite.tolist() == [True, False, True]
        assert all(torch.equal(found.log_probs[row], clean.log_probs[row]) for row in (0, 2))
    else:
        assert not found.is_finite.any()
    assert found.ids[1].tolist() == [0, 1]
    assert found.log_probs[1].tolist() == [-torch.inf] * 2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["input", "up", "weight"])
@pytest.mark.parametrize("shortlist", [STREAMED[2], STREAMED[4]], ids=str)
def test_one_streamed_row_that_is_not_finite_is_flagged(head_maker, shortlist, where, bad):
    head = head_maker(shortlist, exact=True, rank=16, dtype=torch.float16, device=DEVICE)
    x = whole_numbers(1).to(DEVICE, torch.float16)
    assert row_kernels.can_stream_row(torch.nn.functional.linear(x, head.down), head)
    assert kernels.two_stage_topk(x, head, 2).is_finite.all()
    if where == "input":
        x[0, 5] = bad
    elif where == "up":
        head.up[7] = bad
    else:
        head.weight[:] = bad
    found = kernels.two_stage_topk(x, head, 2)
    assert not found.is_finite.any()
    assert found.ids.tolist() == [[0, 1]]
    assert found.log_probs.tolist() == [[-torch.inf] * 2]


@pytest.mark.parametrize(("num_rows", "count"), [(1, 5), (2, 700), (3, 64), (40, 300)])
def test_places_are_those_of_a_sort(monkeypatch, num_rows, count):
    monkeypatch.setattr(rank_kernels, "MOST_COMPARED", 4096)
    generator = torch.Generator().manual_seed(7)
    ids = torch.stack([torch.randperm(5000, generator=generator)[:count] for _ in range(num_rows)])
    logits = torch.randn(num_rows, count, generator=generator).round(decimals=1)
    ids[:, 3] = -1
    logits[:, 3] = -torch.inf
    mass = torch.randn(num_rows, 3, generator=generator)
    scores = logits + torch.randn(num_rows, count, generator=generator)
    scores[:, 2] = -torch.inf
    raised = mass + reference.missing_log_mass(logits, scores)[:, None]
    normalizer = torch.cat([logits, raised], 1).logsumexp(-1)
    keys = reference.rank_keys(logits, ids.clamp(min=0))
    expected = reference.take_topk(keys, normalizer, 4)
    inputs = (tensor.to(DEVICE) for tensor in (ids, logits, scores, mass))
    found = rank_kernels.rank_candidates(*inputs, 4)
    assert torch.equal(found.ids.cpu(), expected.ids)
    torch.testing.assert_close(found.log_probs.cpu(), expected.log_probs, rtol=1e-5, atol=1e-5)
    assert found.is_finite.all()
