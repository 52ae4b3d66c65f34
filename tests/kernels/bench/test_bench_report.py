import dataclasses
import json

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs Triton")

from sgl_eagle_kernels.bench.__main__ import main  # noqa: E402
from sgl_eagle_kernels.bench.case import BenchResult, Environment, Measurement  # noqa: E402
from sgl_eagle_kernels.bench.registry import (  # noqa: E402
    Selection,
    describe_difference,
    make_cases,
)
from sgl_eagle_kernels.bench.report import build_tables, write_report  # noqa: E402
from sgl_eagle_kernels.lm_head import HeadTopk  # noqa: E402


@pytest.fixture
def result():
    environment = Environment(
        gpu="Made-up <GPU>", l2_bytes=1, torch="2", triton="3", cuda="13", commit="abc",
        created="2026-11-30T00:00:00+00:00", copy_bytes_per_us=1e6,
    )  # fmt: skip
    shape = {"V": 1000, "H": 100, "rows": 1}
    rows = [
        Measurement(op="lm_head", variant="full head", shape=shape, floor_bytes=2_000_000,
                    parity="equal", median_us=4.0, p10_us=3.0, p90_us=5.0),
        Measurement(op="lm_head", variant="trimmed to 500", shape=shape | {"V": 500},
                    floor_bytes=1_000_000, parity="equal", median_us=2.0, p10_us=2.0, p90_us=2.0),
        Measurement(op="lm_head", variant="local 10 x 1, rank 5", shape=shape | {"R": 5, "C": 9},
                    floor_bytes=100_000, parity="ids differ"),
        Measurement(op="tree_grow", variant="isotonic", shape={"B": 8, "topk": 4},
                    floor_bytes=500_000, parity="equal", median_us=1.0, p10_us=1.0, p90_us=1.0),
    ]  # fmt: skip
    return BenchResult(environment=environment, measurements=rows)


def test_tables_compare_with_the_full_head_and_the_byte_floor(result):
    head, grow = build_tables(result)
    assert head.title == "lm_head, vocabulary 1000, hidden size 100"
    assert head.rows == [
        ["full head", "1", "4.0", "3.0 to 5.0", "50%", "1.00x"],
        ["trimmed to 500", "1", "2.0", "2.0 to 2.0", "50%", "2.00x"],
        ["local 10 x 1, rank 5", "1", "not timed: ids differ", "", "", ""],
    ]
    assert grow.rows == [["isotonic", "8", "1.0", "1.0 to 1.0", "50%", ""]]


def test_report_is_written_whole(result, tmp_path):
    files = write_report(result, tmp_path / "new", "run")
    assert [file.name for file in files] == ["run.json", "run.html"]
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == ["run.html", "run.json"]
    assert json.loads(files[0].read_text()) == dataclasses.asdict(result)
    page = files[1].read_text()
    assert "Made-up &lt;GPU&gt;" in page
    assert page.count("<svg") == 1
    assert "not timed: ids differ" in page


def test_every_route_is_registered():
    cases = list(make_cases(Selection(shapes=[(49152, 576)], rows=[1], ranks=[64])))
    assert [case.variant for case in cases] == [
        "full head", "trimmed to 32768", "trimmed to 16384", "local 256 x 1, rank 64",
        "local 128 x 1, rank 64", "local 256 x 2, rank 64", "global 512, rank 64",
        *["isotonic", "price"] * 3,
    ]  # fmt: skip
    # A once, B once, one row of h and 192 gathered rows, in half precision.
    assert cases[3].floor_bytes == 2 * (49152 * 64 + 64 * 576 + 576 + 192 * 576)


def test_difference_is_free_at_ties_only():
    wanted = HeadTopk(
        torch.tensor([[-0.5, -1.0, -1.001, -3.0]]),
        torch.tensor([[4, 7, 2, 9]]),
        torch.zeros(1),
        torch.ones(1, dtype=torch.bool),
    )
    assert describe_difference(wanted, wanted) == ""
    swapped = wanted._replace(ids=torch.tensor([[4, 2, 7, 9]]))
    assert describe_difference(swapped, wanted) == ""
    wrong = wanted._replace(ids=torch.tensor([[7, 4, 2, 9]]))
    assert describe_difference(wrong, wanted) == "1 ids differ away from ties"
    far = wanted._replace(log_probs=wanted.log_probs + 0.01)
    assert describe_difference(far, wanted).startswith("log-probabilities differ by")
    flagged = wanted._replace(is_finite=torch.zeros(1, dtype=torch.bool))
    assert describe_difference(flagged, wanted) == "flags differ"


@pytest.mark.parametrize("shapes", ["128256", "128256x4096x2", "0x5"])
def test_shapes_that_make_no_sense_are_refused(shapes, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--shapes", shapes])
    assert "argument --shapes" in capsys.readouterr().err


@pytest.mark.gpu
def test_small_run_on_this_gpu(tmp_path):
    arguments = ["--shapes", "4096x256", "--rows", "1,3", "--ranks", "32", "--samples", "5"]
    assert main([*arguments, "--out", str(tmp_path), "--name", "small"]) == 0
    stored = json.loads((tmp_path / "small.json").read_text())
    assert all(one["median_us"] > 0 for one in stored["measurements"])
