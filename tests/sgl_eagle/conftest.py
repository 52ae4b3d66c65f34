import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tiny_models


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    return tiny_models.write_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="session")
def good_draft(tmp_path_factory):
    return tiny_models.write_good_draft(tmp_path_factory.mktemp("models") / "good")


@pytest.fixture(scope="session")
def random_draft(tmp_path_factory):
    return tiny_models.write_draft(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory):
    return tiny_models.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="session")
def loaded_pair(target_folder, good_draft):
    """The good pair in float32."""
    from sgl_eagle.reference.pair import load_pair

    return load_pair(str(target_folder), good_draft, dtype="float32")
