from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from sgl_eagle_kernels.lm_head import LocalTop, build_two_stage_head, reference  # noqa: E402
from sgl_eagle_kernels.lm_head.dispatch import (  # noqa: E402
    DispatchedHead,
    HeadCostFile,
    HeadCosts,
    RouteTimes,
    choose_route,
    read_head_costs,
)

REPORTS = Path(__file__).parents[3] / "reports" / "kernels"


@pytest.fixture
def costs():
    return HeadCosts(
        num_tokens=203,
        hidden=37,
        rank=11,
        routes={
            "full": RouteTimes(rows=[1, 64, 128], us=[300, 400, 500]),
            "global": RouteTimes(rows=[1, 64, 128], us=[40, 100, 900]),
            "local": RouteTimes(rows=[1, 64, 128], us=[25, 100, 1000]),
        },
    )


@pytest.fixture
def cost_file(costs):
    return HeadCostFile(
        device="Made-up GPU", dtype="bfloat16", topk=8, torch="2", triton="3", commit="abc",
        created="2026-11-30T00:00:00+00:00", source="run.json", heads=[costs],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_rows", "route", "us"),
    [(1, "local", 25.0), (2, "local", 25 + 75 / 63), (64, "global", 100.0), (96, "full", 450.0),
     (128, "full", 500.0)],
)  # fmt: skip
def test_the_fastest_route_is_chosen(costs, num_rows, route, us):
    assert choose_route(costs, num_rows) == route
    assert costs.route_us(route, num_rows) == pytest.approx(us, rel=1e-12)


def test_costs_are_not_extrapolated(costs):
    with pytest.raises(ValueError, match=r"route full: num_rows must be in .*\[1, 128\], got 129"):
        choose_route(costs, 129)
    with pytest.raises(ValueError, match="got 0"):
        choose_route(costs, 0)


@pytest.mark.parametrize(
    ("rows", "us", "message"),
    [
        ([], [], "rows must rise"),
        ([2, 2], [1, 1], "rows must rise"),
        ([0, 1], [1, 1], "rows must rise"),
        ([1, 2], [1], "one time each"),
        ([1], [0.0], "above 0"),
        ([1], [float("nan")], "finite"),
    ],
)
def test_times_that_make_no_sense_are_refused(rows, us, message):
    with pytest.raises(ValueError, match=message):
        RouteTimes(rows=rows, us=us)


def test_costs_of_another_device_or_head_are_refused(cost_file, costs):
    wanted = {"num_tokens": 203, "hidden": 37, "rank": 11}
    assert cost_file.find(device="Made-up GPU", **wanted) == costs
    with pytest.raises(ValueError, match="measured on 'Made-up GPU', running on 'Other GPU'"):
        cost_file.find(device="Other GPU", **wanted)
    with pytest.raises(ValueError, match="hold 203x37 rank 11, not 203x37 rank 12"):
        cost_file.find(device="Made-up GPU", **wanted | {"rank": 12})


def test_files_are_read_strictly(cost_file, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(cost_file.model_dump_json())
    assert read_head_costs(path) == cost_file
    for broken in ("{", path.read_text().replace('"topk":8', '"topk":8,"extra":1')):
        path.write_text(broken)
        with pytest.raises(ValueError, match=r"costs\.json: not a file of head costs"):
            read_head_costs(path)


@pytest.mark.parametrize("path", sorted(REPORTS.glob("*-costs.json")), ids=lambda path: path.name)
def test_published_costs_choose_a_route_for_every_measured_size(path):
    for head in (file := read_head_costs(path)).heads:
        assert (path.parent / file.source).exists()
        assert choose_route(head, 1) == "local"
        for num_rows in head.routes["local"].rows:
            chosen = choose_route(head, num_rows)
            others = [head.route_us(route, num_rows) for route in head.routes]
            assert head.route_us(chosen, num_rows) == min(others)


def test_the_chosen_head_runs(head_maker, costs):
    shortlist = LocalTop(tile_size=16, per_tile=2)
    local = head_maker(shortlist)
    natural = local.up[local.ids.argsort()]
    other = build_two_stage_head(local.weight, natural, local.down, shortlist)
    head = DispatchedHead(
        costs=costs, weight=local.weight, two_stage={"local": local, "global": other}
    )
    for num_rows, expected in [
        (2, lambda x: reference.two_stage_topk(x, local, 4)),
        (100, lambda x: reference.full_topk(x, local.weight, 4)),
    ]:
        x = torch.randn(num_rows, 37, generator=torch.Generator().manual_seed(1))
        found = head.rank_tokens(x, 4)
        assert all(torch.equal(*pair) for pair in zip(found, expected(x), strict=True))
    assert head.head_us(96) == pytest.approx(450.0)
    with pytest.raises(ValueError, match=r"missing \['global'\]"):
        DispatchedHead(costs=costs, weight=local.weight, two_stage={"local": local})
