"""What only a GPU shows of the tree operators: captured graphs that write all outputs."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs Triton")

from sgl_eagle_kernels.bench.tree_cases import draw_trees  # noqa: E402
from sgl_eagle_kernels.tree_grow import IsotonicCurve, StepTemperature, grow_level  # noqa: E402
from sgl_eagle_kernels.tree_grow import reference as grow_reference  # noqa: E402
from sgl_eagle_kernels.tree_select import reference as select_reference  # noqa: E402
from sgl_eagle_kernels.tree_select import select_trees  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]


def replay_over_poison(call):
    """Outputs of a captured call that were filled with what they must not hold."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = call()
    for output in outputs:
        output.fill_(torch.nan if output.is_floating_point() else 77)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return outputs


@pytest.mark.parametrize("batch_size", [1, 64, 300])
@pytest.mark.parametrize(("num_parents", "topk"), [(1, 8), (8, 8), (5, 3), (32, 32)])
def test_a_captured_level_agrees(batch_size, num_parents, topk):
    path = -torch.rand(batch_size, num_parents, device="cuda")
    steps = torch.randn(batch_size, num_parents, topk, device="cuda").log_softmax(-1)
    steps[0, 0, topk - 1] = -torch.inf
    knots = torch.linspace(0, 1, 17, device="cuda")
    for calibration in (
        IsotonicCurve(knots=knots, lowest_log=-9.0),
        StepTemperature(temperature=1.7),
    ):
        width = min(8, num_parents * topk)
        found = replay_over_poison(
            lambda c=calibration, w=width: grow_level(
                path, path.exp(), steps, calibration=c, width=w
            )
        )
        wanted = grow_reference.grow_level(path, path.exp(), steps, calibration, width)
        assert torch.equal(found.frontier, wanted.frontier)
        assert torch.equal(found.path, wanted.path)
        torch.testing.assert_close(found.prob, wanted.prob, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(found.frontier_prob, wanted.frontier_prob, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("batch_size", [1, 64, 300])
@pytest.mark.parametrize(("topk", "num_steps"), [(8, 8), (3, 5), (1, 4)])
def test_captured_trees_agree(batch_size, topk, num_steps):
    prob, parents, depths = draw_trees(7, batch_size, topk, num_steps)
    sizes = torch.tensor([1, 4, 8, 24, 64], device="cuda")
    price = sizes * torch.linspace(0, 0.1, batch_size, device="cuda")[:, None].double()
    roots = torch.arange(batch_size, device="cuda") + 100
    found = replay_over_poison(
        lambda: select_trees(
            prob, parents, depths, roots, sizes=sizes, verify_price=price, num_draft_tokens=64
        )
    )
    wanted = select_reference.select_trees(prob, parents, depths, roots, sizes, price, 64)
    for name, tensor in wanted._asdict().items():
        assert torch.equal(getattr(found, name), tensor), name
