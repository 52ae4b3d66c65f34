"""Tree kernels against the harness: whole numbers to the bit, probabilities to rounding."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="needs Triton")
with pytest.MonkeyPatch.context() as environment:
    if DEVICE == "cpu":
        environment.setenv("TRITON_INTERPRET", "1")
    import sgl_eagle_kernels.tree_grow._triton as grow_kernels
    import sgl_eagle_kernels.tree_select._triton as select_kernels
if DEVICE == "cpu" and not hasattr(grow_kernels.tl.max, "rewrite"):
    pytest.skip("Triton was imported before, without its interpreter", allow_module_level=True)

from sgl_eagle_harness.calibration import IdentityMap, IsotonicMap, TemperatureMap  # noqa: E402
from sgl_eagle_harness.draft_loop import verify_tree  # noqa: E402
from sgl_eagle_harness.early_stop import merge_best, size_values  # noqa: E402
from sgl_eagle_harness.tree_build import (  # noqa: E402
    keep_columns,
    rank_log_scores,
    rank_probs,
    take_best,
)
from sgl_eagle_harness.tree_layout import build_layout  # noqa: E402
from sgl_eagle_harness.types import NO_NODE, CandidateTrees, Children  # noqa: E402
from sgl_eagle_kernels.tree_grow import (  # noqa: E402
    IdentityCurve,
    IsotonicCurve,
    StepTemperature,
)
from sgl_eagle_kernels.tree_grow import reference as grow_reference  # noqa: E402
from sgl_eagle_kernels.tree_select import reference as select_reference  # noqa: E402

KNOTS = np.linspace(0, 1, 17, dtype=np.float32) ** 2
MAPS = {
    "identity": (IdentityMap(), lambda: IdentityCurve()),
    "temperature": (
        TemperatureMap(temperatures=(1.7,)),
        lambda: StepTemperature(temperature=1.7),
    ),
    "isotonic": (
        IsotonicMap(lowest_log=-9.0, curves=(tuple(KNOTS.tolist()),)),
        lambda: IsotonicCurve(knots=torch.from_numpy(KNOTS).to(DEVICE), lowest_log=-9.0),
    ),
}


GROW = {"reference": grow_reference.grow_level, "triton": grow_kernels.grow_level}
SELECT = {"reference": select_reference.select_trees, "triton": select_kernels.select_trees}


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    # The first call of a kernel compiles its source again.
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _fresh_memory_is_wrong(monkeypatch):
    empty = torch.empty

    def filled(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        if tensor.is_floating_point():
            return tensor.fill_(torch.nan)
        return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)

    monkeypatch.setattr(torch, "empty", filled)


def random_children(rng, num_rows, width, topk, *, ties):
    if ties:
        log_probs = -rng.integers(1, 4, (num_rows, width, topk)).astype(np.float32) / 2
    else:
        log_probs = np.log(rng.dirichlet([0.3] * (topk + 2), (num_rows, width))[..., :topk])
    log_probs = -np.sort(-log_probs, axis=-1).astype(np.float32)
    valid = rng.random((num_rows, width, topk)) > 0.1
    valid[:, 0, 0] = True
    return Children(
        tokens=rng.integers(0, 1000, log_probs.shape),
        log_probs=np.maximum(log_probs, np.float32(-60)),
        handles=np.zeros(log_probs.shape, np.int64),
        valid=valid,
    )


@pytest.mark.parametrize("op", ["reference", "triton"])
@pytest.mark.parametrize("name", list(MAPS))
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("num_rows", "topk", "num_steps"), [(1, 1, 3), (3, 3, 4), (2, 8, 3)])
def test_levels_are_those_of_the_harness(op, name, ties, num_rows, topk, num_steps):
    rng = np.random.default_rng(7)
    harness_map, make = MAPS[name]
    grow = GROW[op]
    trees = CandidateTrees.empty(num_rows)
    frontier = np.full((num_rows, 1), NO_NODE)
    path = torch.zeros(num_rows, 1, device=DEVICE)
    prob = torch.ones(num_rows, 1, device=DEVICE)
    probs = []
    for _ in range(num_steps):
        children = random_children(rng, num_rows, frontier.shape[1], topk, ties=ties)
        children.valid[frontier == NO_NODE] &= trees.depth == 0
        steps = np.where(children.valid, children.log_probs, -np.inf).astype(np.float32)
        level = grow(path, prob, torch.from_numpy(steps).to(DEVICE), make(), topk)
        trees = trees.append(frontier, children)
        columns = trees.last_level
        assert np.array_equal(level.path.cpu().numpy(), trees.path_log_confidence[:, columns])
        probs.append(level.prob.cpu().numpy())
        valid = trees.valid[:, columns]
        best = take_best(rank_log_scores(trees.path_log_confidence[:, columns], valid), topk)
        kept = np.take_along_axis(valid, best, axis=1)
        assert np.array_equal(level.frontier.cpu().numpy(), np.where(kept, best, NO_NODE))
        frontier = np.where(kept, best + columns.start, NO_NODE)
        path, prob = level.frontier_path, level.frontier_prob
    expected = harness_map.accept_probs(
        trees.path_log_confidence, trees.step_log_probs, trees.depths, trees.ranks, trees.parents
    )
    found = np.concatenate(probs, axis=1)
    np.testing.assert_allclose(found, np.where(trees.valid, expected, 0), rtol=2e-5, atol=2e-6)
    above = np.take_along_axis(found, np.maximum(trees.parents, 0), axis=1)
    assert (found <= np.where(trees.parents >= 0, above, 1)).all()


def random_trees(rng, num_rows, topk, num_steps, *, ties):
    trees = CandidateTrees.empty(num_rows)
    frontier = np.full((num_rows, 1), NO_NODE)
    for _ in range(num_steps):
        children = random_children(rng, num_rows, frontier.shape[1], topk, ties=ties)
        children.valid[frontier == NO_NODE] &= trees.depth == 0
        trees = trees.append(frontier, children)
        level = trees.last_level
        keys = rank_log_scores(trees.path_log_confidence[:, level], trees.valid[:, level])
        best = take_best(keys, topk)
        kept = np.take_along_axis(trees.valid[:, level], best, axis=1)
        frontier = np.where(kept, best + level.start, NO_NODE)
    return trees


@pytest.mark.parametrize("op", ["reference", "triton"])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("price", [0.0, 0.05, 10.0])
@pytest.mark.parametrize(
    ("num_rows", "topk", "num_steps", "sizes"),
    [(1, 1, 1, [1, 2]), (3, 3, 4, [1, 2, 3, 5, 9, 17]), (2, 8, 3, [1, 7, 64]), (2, 2, 2, [1, 30])],
)
def test_trees_are_those_of_the_price_rule(op, ties, price, num_rows, topk, num_steps, sizes):
    rng = np.random.default_rng(11)
    trees = random_trees(rng, num_rows, topk, num_steps, ties=ties)
    prob = np.where(trees.valid, np.exp(trees.path_log_confidence), 0).astype(np.float32)
    verify_price = price * (np.array(sizes) - 1)[None] * rng.uniform(0.5, 2, (num_rows, 1))
    root_positions = rng.integers(5, 900, num_rows)
    width = sizes[-1]
    found = SELECT[op](
        torch.from_numpy(prob).to(DEVICE),
        torch.from_numpy(trees.parents).to(DEVICE),
        torch.from_numpy(trees.depths).to(DEVICE),
        torch.from_numpy(root_positions).to(DEVICE),
        torch.tensor(sizes, device=DEVICE),
        torch.from_numpy(verify_price).to(DEVICE),
        width,
    )
    arrays = {key: tensor.cpu().numpy() for key, tensor in found._asdict().items()}

    empty = np.empty((num_rows, 0), np.float32)
    values = size_values(merge_best(empty, prob, width - 1), np.array(sizes), verify_price)
    num_nodes = np.array(sizes)[values.argmax(axis=1)] - 1
    order = take_best(rank_probs(prob.astype(np.float64), trees.valid), int(num_nodes.max()))
    kept = np.arange(order.shape[1]) < num_nodes[:, None]
    columns = keep_columns(order, kept & np.take_along_axis(trees.valid, order, axis=1))
    for row in range(num_rows):
        tree = verify_tree(trees, row, columns[row], 0)
        layout = build_layout(tree.parents, int(root_positions[row]))
        count = len(tree.parents)
        assert arrays["num_draft_tokens"][row] == count
        for key, wanted in {
            "columns": tree.columns,
            "parents": tree.parents,
            "depths": layout.depths,
            "positions": layout.positions,
            "first_child": layout.first_child,
            "next_sibling": layout.next_sibling,
        }.items():
            assert np.array_equal(arrays[key][row, :count], wanted), key
        assert np.array_equal(arrays["ancestors"][row, :count, :count], layout.ancestors)
        assert not arrays["ancestors"][row, :count, count:].any()
        for node in range(count, width):  # padding
            assert np.flatnonzero(arrays["ancestors"][row, node]).tolist() == [0, node]
        assert (arrays["columns"][row, count:] == -1).all()
        assert (arrays["parents"][row, count:] == 0).all()
        assert (arrays["depths"][row, count:] == 1).all()
        assert (arrays["first_child"][row, count:] == -1).all()
        assert (arrays["next_sibling"][row, count:] == -1).all()
    flat = np.arange(num_rows * width).reshape(num_rows, width)
    assert np.array_equal(arrays["flat_index"], flat)


@pytest.mark.parametrize("op", ["reference", "triton"])
def test_a_long_chain_keeps_all_ancestors(op):
    num_nodes = 60
    found = SELECT[op](
        0.95 ** torch.arange(num_nodes, device=DEVICE, dtype=torch.float32)[None],
        torch.arange(-1, num_nodes - 1, device=DEVICE)[None],
        torch.arange(1, num_nodes + 1, device=DEVICE),
        torch.tensor([5], device=DEVICE),
        torch.tensor([1, num_nodes + 1], device=DEVICE),
        torch.zeros(1, 2, dtype=torch.float64, device=DEVICE),
        num_nodes + 1,
    )
    assert found.parents[0].tolist() == list(range(-1, num_nodes))
    assert found.positions[0].tolist() == list(range(5, num_nodes + 6))
    assert torch.equal(found.ancestors[0], torch.ones_like(found.ancestors[0]).tril())
