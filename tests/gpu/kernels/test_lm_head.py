"""What only a GPU shows of the LM head: half precision, captured graphs, large tensors."""

import ctypes

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs Triton")

from sgl_eagle_kernels import launch  # noqa: E402
from sgl_eagle_kernels.bench.head_cases import (  # noqa: E402
    compare_heads,
    describe_difference,
    two_stage_case,
)
from sgl_eagle_kernels.lm_head import (  # noqa: E402
    GlobalTop,
    LocalTop,
    build_two_stage_head,
    rank_full,
    rank_tokens,
    reference,
)
from sgl_eagle_kernels.lm_head._triton import projection  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]

SHORTLISTS = [
    GlobalTop(num_candidates=512),
    LocalTop(tile_size=256, per_tile=1),
    LocalTop(tile_size=256, per_tile=2),
    LocalTop(tile_size=200, per_tile=3, shuffle_seed=None),
]


def make_head(shortlist, num_tokens, hidden, rank, dtype, *, quantize=False, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(rows, columns):
        values = torch.randn(rows, columns, generator=generator, device="cuda")
        return values / columns**0.5

    up, down = normal(num_tokens, rank), normal(rank, hidden)
    weight = up @ down * hidden**0.5 + normal(num_tokens, hidden) / 4
    return build_two_stage_head(
        *(tensor.to(dtype) for tensor in (weight, up, down)), shortlist, quantize=quantize
    )


def make_input(num_rows, head, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(num_rows, head.weight.shape[1], generator=generator, device="cuda")
    return values.to(head.weight.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shortlist", SHORTLISTS, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "rank"),
    [(5003, 264, 64), (5003, 40, 33), (32001, 4096, 256), (151936, 576, 100)],
    ids=str,
)
@pytest.mark.parametrize("num_rows", [1, 5, 16, 17, 33, 64, 257])
def test_half_precision_agrees(shortlist, num_tokens, hidden, rank, num_rows, dtype):
    head = make_head(shortlist, num_tokens, hidden, rank, dtype)
    assert compare_heads(make_input(num_rows, head), head, 8) == ""


@pytest.mark.parametrize("shortlist", SHORTLISTS, ids=str)
@pytest.mark.parametrize("num_rows", [3, 1024])
def test_int8_and_many_rows_agree(shortlist, num_rows):
    head = make_head(shortlist, 20011, 264, 128, torch.bfloat16, quantize=True)
    assert compare_heads(make_input(num_rows, head), head, 8) == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_rows"), [(5003, 1), (128256, 7), (262144, 1), (151936, 64)]
)
def test_the_full_head_agrees(num_tokens, num_rows, dtype):
    head = make_head(GlobalTop(num_candidates=8), num_tokens, 264, 16, dtype)
    x = make_input(num_rows, head)
    expected = reference.full_topk(x, head.weight, 8)
    found = rank_full(x, head.weight, 8)
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shortlist", SHORTLISTS, ids=str)
def test_bad_rows_are_flagged_among_many(shortlist):
    head = make_head(shortlist, 20011, 264, 64, torch.bfloat16)
    x = make_input(64, head)
    clean = rank_tokens(x, head, 8)
    x[5] = torch.nan
    x[63, 17] = torch.inf
    found = rank_tokens(x, head, 8)
    assert torch.nonzero(~found.is_finite).flatten().tolist() == [5, 63]
    assert found.ids[5].tolist() == list(range(8))
    good = found.is_finite
    assert torch.equal(found.ids[good], clean.ids[good])
    assert torch.equal(found.log_probs[good], clean.log_probs[good])


def capture(call):
    """Warm up, then capture: the graph and the outputs that it writes."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = call()
    return graph, outputs


def poison(outputs):
    for output in outputs:
        output.fill_(torch.nan if output.is_floating_point() else 77)


CALLS = [
    *(
        pytest.param(lambda x, head: rank_tokens(x, head, 8), shortlist, id=str(shortlist))
        for shortlist in SHORTLISTS
    ),
    pytest.param(
        lambda x, head: rank_full(x, head.weight, 8), GlobalTop(num_candidates=8), id="full"
    ),
]


@pytest.mark.parametrize(("call", "shortlist"), CALLS)
@pytest.mark.parametrize("num_rows", [1, 64, 1024])
def test_a_graph_writes_all_outputs_and_follows_its_input(call, shortlist, num_rows):
    head = make_head(shortlist, 32001, 264, 64, torch.bfloat16)
    x = make_input(num_rows, head)
    graph, outputs = capture(lambda: call(x, head))
    for seed in (2, 3):
        x.copy_(make_input(num_rows, head, seed))
        poison(outputs)
        graph.replay()
        for found, wanted in zip(outputs, call(x, head), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize(("call", "shortlist"), CALLS)
def test_a_captured_call_neither_allocates_nor_synchronises(call, shortlist):
    head = make_head(shortlist, 32001, 264, 64, torch.bfloat16)
    x = make_input(3, head)
    graph, _ = capture(lambda: call(x, head))
    torch.cuda.synchronize()
    watched = ("allocation.all.allocated", "segment.all.allocated", "num_device_alloc")
    before = {key: torch.cuda.memory_stats()[key] for key in watched}
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            graph.replay()
        call(x, head)  # would raise at the first wait of the host
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    after = {key: torch.cuda.memory_stats()[key] for key in watched}
    # The call outside the graph takes its outputs from memory that torch holds already.
    assert after["segment.all.allocated"] == before["segment.all.allocated"]
    assert after["num_device_alloc"] == before["num_device_alloc"]
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    graph.replay()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize(
    ("shortlist", "num_rows"),
    [
        (SHORTLISTS[0], 1),
        (SHORTLISTS[1], 1),
        (SHORTLISTS[1], 4),
        (SHORTLISTS[2], 1),
        (SHORTLISTS[3], 1),
        (LocalTop(tile_size=1024, per_tile=2), 1),
        (LocalTop(tile_size=2048, per_tile=1), 1),
    ],
)
def test_as_many_kernels_run_as_the_benchmark_says(shortlist, num_rows):
    head = make_head(shortlist, 32001, 264, 64, torch.bfloat16)
    num_launches = two_stage_case(32001, 264, num_rows, 64, shortlist).num_launches
    x = make_input(num_rows, head)
    rank_tokens(x, head, 8)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        rank_tokens(x, head, 8)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.name.endswith("kernel")]
    assert len(kernels) == num_launches, kernels


def test_small_kernels_leave_shared_memory_to_the_next(monkeypatch):
    asked = []
    set_attribute = launch.leave_shared_memory
    monkeypatch.setattr(
        projection,
        "leave_shared_memory",
        lambda kernel: (set_attribute(kernel), asked.append(kernel)),
    )
    head = make_head(SHORTLISTS[1], 32001, 264, 64, torch.bfloat16)
    rank_tokens(make_input(1, head), head, 8)
    percent = ctypes.c_int(0)
    status = ctypes.CDLL("libcuda.so.1").cuFuncGetAttribute(
        ctypes.byref(percent), launch.CARVEOUT_ATTRIBUTE, ctypes.c_void_p(asked[0].function)
    )
    assert (status, percent.value) == (0, launch.CARVEOUT)


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("large", ["weight", "up"])
def test_more_than_two_billion_elements_are_addressed(large, num_rows):
    num_tokens = 262_144
    hidden, rank = (8200, 16) if large == "weight" else (16, 8200)
    weight = torch.zeros(num_tokens, hidden, dtype=torch.bfloat16, device="cuda")
    up = torch.zeros(num_tokens, rank, dtype=torch.bfloat16, device="cuda")
    weight[-1], up[-1] = 1, 1
    down = torch.ones(rank, hidden, dtype=torch.bfloat16, device="cuda") / hidden
    x = torch.ones(num_rows, hidden, dtype=torch.bfloat16, device="cuda")
    for shortlist in (GlobalTop(num_candidates=64), LocalTop(tile_size=512, per_tile=1)):
        head = build_two_stage_head(weight, up, down, shortlist)
        found = rank_tokens(x, head, 1)
        assert found.ids.tolist() == [[num_tokens - 1]] * num_rows
        assert found.is_finite.all()


def test_the_same_call_gives_the_same_bits():
    head = make_head(SHORTLISTS[0], 32001, 264, 64, torch.bfloat16)
    x = make_input(64, head)
    first = rank_tokens(x, head, 8)
    for _ in range(20):
        assert all(torch.equal(*pair) for pair in zip(rank_tokens(x, head, 8), first, strict=True))


def test_a_difference_would_be_seen():
    head = make_head(SHORTLISTS[1], 5003, 264, 64, torch.bfloat16)
    x = make_input(4, head)
    found = rank_tokens(x, head, 8)
    wrong = found._replace(ids=found.ids.roll(1, dims=1))
    assert describe_difference(wrong, found) != ""
