"""`sgl-eagle report`: from a run's numbers to its page."""

import json
import runpy
from pathlib import Path

import pytest

from sgl_eagle.cli import main
from sgl_eagle_tuner.report.data import REPORT_FILE, save_report

MAKER = Path(__file__).parents[1] / "data" / "make_demo_report.py"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    report = runpy.run_path(str(MAKER))["make_bare_report"]()
    save_report(report, tmp_path / "run" / REPORT_FILE)
    return tmp_path / "run"


def test_the_page_lands_where_it_was_asked_for(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pages" / "demo.html"
    assert main(["report", str(run_dir), "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out == f"wrote {out}\n"


def test_the_page_lands_beside_the_numbers_by_default(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run_dir), "--format", "json"]) == 0
    page = run_dir / "report.html"
    result = json.loads(capsys.readouterr().out)
    assert result == {"report": str(page), "num_bytes": page.stat().st_size}


def test_a_run_without_numbers_is_one_line_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert str(tmp_path / REPORT_FILE) in captured.err
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


def test_a_malformed_file_names_the_field(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_dir / REPORT_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"title": 3}))
    assert main(["report", str(run_dir)]) == 1
    assert f"{path}: title:" in capsys.readouterr().err
    assert not (run_dir / "report.html").exists()


def test_an_output_that_is_a_folder_is_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run_dir), "--out", str(run_dir)]) == 1
    assert "--out must name a file" in capsys.readouterr().err
