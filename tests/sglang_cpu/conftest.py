import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import server_process
from policy_files import write_policies


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Folder with the tiny target and its hand-made draft."""
    folder = tmp_path_factory.mktemp("pair")
    server_process.make_tiny_pair(folder)
    return folder


@pytest.fixture(scope="session")
def policies(tmp_path_factory):
    """Policy files by name."""
    return write_policies(tmp_path_factory.mktemp("policies"))


@pytest.fixture(scope="session")
def completions(pair):
    """Greedy completions of the target by Hugging Face: pairs of prompt and completion ids."""
    return server_process.complete_with_hugging_face(pair / "target", num_prompts=12)
