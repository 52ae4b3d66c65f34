"""The installed SGLang has what the plugin uses, whether or not a test gets there."""

from pathlib import Path

import pytest

import sgl_eagle.plugin

GET_SPEC = "from sglang.srt.runtime_context import get_spec"

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PLUGIN = Path(sgl_eagle.plugin.__file__).parent


def test_every_symbol_exists_and_takes_its_arguments(fork_server):
    assert fork_server.call("used_symbols", "find_missing", str(PLUGIN)) == []


def test_the_worker_inherits_what_it_uses(fork_server):
    assert fork_server.call("used_symbols", "find_uninherited", str(PLUGIN / "worker.py")) == []


def test_the_algorithm_answers_every_question(fork_server):
    assert fork_server.call("used_symbols", "find_unanswered") == []


def test_the_plugin_reads_the_version_that_runs(fork_server):
    read, running = fork_server.call("used_symbols", "version")
    assert read == running


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("from sglang.srt.nowhere import thing", "no module sglang.srt.nowhere"),
        ("from sglang.nowhere.deeper import thing", "no module sglang.nowhere.deeper"),
        ("from sglang.srt.runtime_context import get_gone", "no get_gone in sglang.srt.runtime_co"),
        (f"def f():\n    {GET_SPEC}\n    get_spec(page=1)", "unexpected keyword argument 'page'"),
        (
            f"def f():\n    {GET_SPEC}\n    get_spec(1, 2)",
            "get_spec: too many positional arguments",
        ),
        (f"{GET_SPEC}\nget_spec()", ""),
        ("from sglang.srt import runtime_context", ""),
    ],
)
def test_what_is_missing_is_found(fork_server, statement, problem):
    found = fork_server.call("used_symbols", "check_source", statement)
    assert len(found) == bool(problem)
    assert all(problem in text for _, text in found)
