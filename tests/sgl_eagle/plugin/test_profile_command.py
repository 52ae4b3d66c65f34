"""`sgl-eagle profile --engine sglang`, with stand-ins for the server."""

import sys
from datetime import UTC, datetime

import pytest
from fake_server import FakeServer, measure

from sgl_eagle.cli import main
from sgl_eagle.plugin.profile_command import profile_server
from sgl_eagle_harness.cost_file import CostFile, load_cost_file, save_cost_file
from sgl_eagle_harness.errors import CostTableError

SERVER = (
    "import os, pathlib, shutil, sys, time\n"
    "assert 'SGLEAGLE_POLICY' not in os.environ\n"
    "folder = pathlib.Path(os.environ['SGLEAGLE_COST_CACHE'])\n"
    "folder.mkdir()\n"
    "shutil.copy(sys.argv[1], folder / 'half')\n"
    "(folder / 'half').rename(folder / 'table.json')\n"
    "time.sleep(3600)\n"
)


@pytest.fixture
def table(tmp_path):
    costs, _ = measure(FakeServer(), num_repeats=1)
    record = CostFile.from_table(costs, num_repeats=1, created=datetime(2026, 1, 1, tzinfo=UTC))
    save_cost_file(tmp_path / "made.json", record)
    return tmp_path / "made.json"


def test_the_servers_table_is_the_result(table, monkeypatch):
    monkeypatch.setenv("SGLEAGLE_POLICY", "policy.json")
    found = profile_server([sys.executable, "-c", SERVER, str(table)], timeout_s=300)
    assert found == load_cost_file(table)


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("raise SystemExit('no such model')", "no such model"),
        (
            "import time; print('costs could not be measured within 30 s', flush=True); "
            "time.sleep(3600)",
            "could not be measured within 30 s",
        ),
        (
            "import time; print('serves by costs that it does not keep: rounds', flush=True); "
            "time.sleep(3600)",
            "does not keep: rounds",
        ),
    ],
)
def test_a_server_without_a_table_shows_the_end_of_its_log(code, shown):
    with pytest.raises(CostTableError, match=f"measured no cost table(.|\n)*{shown}"):
        profile_server([sys.executable, "-c", code], timeout_s=300)


def test_the_command_prints_every_batch(table, monkeypatch, tmp_path, capsys):
    asked = []

    def pretend(command):
        asked.append(command)
        return load_cost_file(table)

    monkeypatch.setattr("sgl_eagle.plugin.profile_command.profile_server", pretend)
    out = tmp_path / "cost.json"
    models = ["--target", "models/t", "--draft", "models/d"]
    command = ["profile", "--engine", "sglang", *models, "--out", str(out), "--quiet"]
    assert main([*command, "--", "--context-length", "512"]) == 0
    assert load_cost_file(out) == load_cost_file(table)
    assert asked[0][-2:] == ["--context-length", "512"]
    assert "SGL_EAGLE" in asked[0]
    printed = capsys.readouterr().out
    assert "ms at context 512" in printed
    assert [line.split()[2:4] for line in printed.splitlines() if "target pass" in line[:12]][
        :4
    ] == [["1", "1"], ["1", "2"], ["1", "8"], ["4", "1"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "sglang"], "--engine sglang needs --target and --draft"),
        (["--engine", "sglang", "--repeats", "3"], "--repeats must be left out with --engine"),
        (["--", "--port", "1"], "flags after two dashes are for --engine sglang, got --port 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message, tmp_path, capsys):
    assert main(["profile", "--out", str(tmp_path / "cost.json"), *options]) == 2
    assert message in capsys.readouterr().err
