"""`sgl-eagle serve`: the command it prints, and what it refuses before SGLang starts."""

import json
import shlex
from importlib.util import find_spec

import pytest

from sgl_eagle.cli import main

PAIR = ("--target", "models/target", "--draft", "models/draft head")


def test_prints_a_command_that_a_shell_understands(capsys):
    assert main(["serve", *PAIR, "--print", "--", "--port", "30001", "--tp-size=1"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[1:] == [
        *("-m", "sglang.launch_server", "--model-path", "models/target"),
        *("--speculative-algorithm", "SGL_EAGLE"),
        *("--speculative-draft-model-path", "models/draft head", "--port", "30001", "--tp-size=1"),
    ]


def test_a_bad_policy_file_is_named_before_anything_runs(capsys, tmp_path):
    path = tmp_path / "policy.json"
    path.write_text("{}")
    assert main(["serve", *PAIR, "--policy", str(path)]) == 1
    assert f"{path}: schema_version must be 1" in capsys.readouterr().err


def test_json_names_the_policy(capsys):
    assert main(["serve", *PAIR, "--print", "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["policy"] is None
    assert result["command"][1:3] == ["-m", "sglang.launch_server"]


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed")
def test_without_sglang_the_extra_is_named(capsys):
    assert main(["serve", *PAIR]) == 1
    assert 'pip install "sgl-eagle[sglang]"' in capsys.readouterr().err
