import dataclasses
import json

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs Triton")

from sgl_eagle_kernels.bench.__main__ import main  # noqa: E402
from sgl_eagle_kernels.bench.case import BenchResult, Environment, Measurement  # noqa: E402
from sgl_eagle_kernels.bench.head_cases import (  # noqa: E402
    choose_tile_size,
    describe_difference,
    two_stage_case,
)
from sgl_eagle_kernels.bench.registry import Selection, make_cases  # noqa: E402
from sgl_eagle_kernels.bench.report import build_tables, write_report  # noqa: E402
from sgl_eagle_kernels.lm_head import GlobalTop, HeadTopk  # noqa: E402


@pytest.fixture
def result():
    environment = Environment(
        gpu="Made-up <GPU>", l2_bytes=1, torch="2", triton="3", cuda="13", commit="abc",
        created="2026-11-30T00:00:00+00:00", ceiling_bytes_per_us=1e6, launch_us=0.5,
    )  # fmt: skip
    shape = {"V": 1000, "H": 100, "rows": 1}
    factored = shape | {"R": 5, "C": 9}
    rows = [
        Measurement(op="lm_head", variant="full head", shape=shape, floor_bytes=2_000_000,
                    parity="equal", median_us=4.0, p10_us=3.0, p90_us=5.0),
        Measurement(op="lm_head", variant="full head, our ranking", shape=shape,
                    floor_bytes=2_000_000, parity="equal", median_us=2.5, p10_us=2.5, p90_us=2.5),
        Measurement(op="lm_head", variant="trimmed to 500", shape=shape | {"kept": 500},
                    floor_bytes=1_000_000, parity="equal", median_us=2.0, p10_us=2.0, p90_us=2.0),
        Measurement(op="lm_head", variant="local 10 x 1, rank 5", shape=factored,
                    floor_bytes=100_000, parity="ids differ", num_launches=4),
        Measurement(op="lm_head", variant="global 9, rank 5", shape=factored,
                    floor_bytes=1_000_000, parity="equal", num_launches=2, median_us=3.0,
                    p10_us=3.0, p90_us=3.0),
        Measurement(op="tree_grow", variant="isotonic", shape={"B": 8, "topk": 4},
                    floor_bytes=500_000, parity="equal", median_us=1.0, p10_us=1.0, p90_us=1.0),
    ]  # fmt: skip
    return BenchResult(environment=environment, measurements=rows)


def test_tables_compare_with_the_full_head_and_the_byte_floor(result):
    head, grow = build_tables(result)
    assert head.title == "lm_head, vocabulary 1000, hidden size 100"
    assert head.rows == [
        ["full head", "1", "4.0", "3.0 to 5.0", "1.00x", "0.62x", "50%", ""],
        ["full head, our ranking", "1", "2.5", "2.5 to 2.5", "1.60x", "1.00x", "80%", ""],
        ["trimmed to 500", "1", "2.0", "2.0 to 2.0", "2.00x", "1.25x", "50%", ""],
        ["local 10 x 1, rank 5", "1", "not measured: ids differ", "", "", "", "", ""],
        ["global 9, rank 5", "1", "3.0", "3.0 to 3.0", "1.33x", "0.83x", "33%", "50%"],
    ]
    assert grow.rows == [["isotonic", "8", "1.0", "1.0 to 1.0", "", "", "50%", ""]]


def test_report_is_written_whole(result, tmp_path):
    files = write_report(result, tmp_path / "new", "run")
    names = ["run.json", "run.html"]
    assert [file.name for file in files] == names
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == sorted(names)
    assert json.loads(files[0].read_text()) == dataclasses.asdict(result)
    page = files[1].read_text()
    assert "Made-up &lt;GPU&gt;" in page
    assert page.count("<svg") == 1
    assert "not measured: ids differ" in page


def test_every_route_is_registered():
    cases = list(make_cases(Selection(shapes=[(49152, 576)], rows=[1], ranks=[64])))
    assert [case.variant for case in cases] == [
        "low-rank matrix only read, rank 64", "full head", "full head, our ranking",
        "trimmed to 32768", "trimmed to 16384", "clusters 8 x 128",
        "low-rank logits alone, rank 64", "local 128 x 1, rank 64",
        "local 128 x 1, no shuffle, rank 64", "local 256 x 2, rank 64",
        "local 128 x 1, int8, rank 64", "global 512, rank 64", *["isotonic", "price"] * 3,
    ]  # fmt: skip
    # A once, B once, one row of h and 384 gathered rows, in half precision.
    assert cases[7].floor_bytes == 2 * (49152 * 64 + 64 * 576 + 576 + 384 * 576)
    assert cases[9].floor_bytes == cases[7].floor_bytes
    assert cases[10].floor_bytes == cases[7].floor_bytes + 49152 * (4 - 64)


def test_plans_of_few_rows_fit_the_device(monkeypatch):
    monkeypatch.setattr("sgl_eagle_kernels.launch.shared_memory_bytes", lambda _: 232_448)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    selection = Selection(shapes=[(128256, 4096)], rows=[1, 8, 16], ranks=[256], plans=True)
    variants = [case.variant for case in make_cases(selection)]
    cut = variants[: len(variants) // 2]
    assert cut == variants[len(cut) :]  # of one row and of eight
    assert cut[0] == "local 256 x 1, rank 256, 4 x 4 stages of 32, 2 warps"
    assert len(set(cut)) == len(cut)
    assert "local 256 x 1, rank 256, 1 x 7 stages of 64, 4 warps" in cut
    assert "local 256 x 1, rank 256, 2 x 5 stages of 64, 4 warps" not in cut  # 256 KiB


def test_rows_that_shortlists_share_are_read_once():
    one, many = (two_stage_case(1000, 10, rows, 5, GlobalTop(num_candidates=100)).floor_bytes
                 for rows in (1, 2))  # fmt: skip
    # Two independent tenths of the vocabulary cover 19 % of it.
    assert many - one == 2 * 10 * (1 + 90)


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
    assert describe_difference(far, wanted) == "logits differ by 1.00e-02"
    shifted = far._replace(log_normalizer=wanted.log_normalizer - 0.01)
    assert describe_difference(shifted, wanted) == "normalizers differ by 1.00e-02"
    assert describe_difference(shifted, wanted, normalizer_tolerance=0.02) == ""
    flagged = wanted._replace(is_finite=torch.zeros(1, dtype=torch.bool))
    assert describe_difference(flagged, wanted) == "flags differ"


@pytest.mark.parametrize(
    ("num_tokens", "tile_size"), [(49152, 128), (128256, 256), (262144, 512), (100, 16)]
)
def test_tiles_make_about_512_candidates(num_tokens, tile_size):
    assert choose_tile_size(num_tokens) == tile_size


@pytest.mark.parametrize("shapes", ["128256", "128256x4096x2", "0x5"])
def test_shapes_that_make_no_sense_are_refused(shapes, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--shapes", shapes])
    assert "argument --shapes" in capsys.readouterr().err


@pytest.mark.parametrize("samples", ["1", "-3"])
def test_too_few_samples_are_refused(samples, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--samples", samples])
    assert "must be 0 or at least 2" in capsys.readouterr().err


@pytest.mark.gpu
def test_small_run_on_this_gpu(tmp_path):
    arguments = ["--shapes", "4096x256", "--rows", "1,3", "--ranks", "32", "--samples", "5"]
    assert main([*arguments, "--out", str(tmp_path), "--name", "small"]) == 0
    stored = json.loads((tmp_path / "small.json").read_text())
    assert all(one["median_us"] > 0 for one in stored["measurements"])
