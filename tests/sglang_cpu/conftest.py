import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from policy_files import write_policies
from server_process import COMPLETION_LENGTH, SHORT_CONTEXT, STAND_IN_ATTENTION, ForkServer

NUM_PROMPTS = 12
LONGEST_TEXT = SHORT_CONTEXT - 2
"""Prompt and completion, in SGLang without speculation too."""


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory):
    """Starts servers whose attention is the stand-in."""
    running = ForkServer(tmp_path_factory.mktemp("fork_server") / "log", STAND_IN_ATTENTION)
    yield running
    running.close()


@pytest.fixture(scope="session")
def pair(fork_server, tmp_path_factory):
    """Folder with the tiny target and its hand-made draft."""
    folder = tmp_path_factory.mktemp("pair")
    fork_server.call("tiny_pair", "make_pair", str(folder))
    return folder


@pytest.fixture(scope="session")
def policies(tmp_path_factory):
    """Policy files by name."""
    return write_policies(tmp_path_factory.mktemp("policies"))


@pytest.fixture(scope="session")
def completions(fork_server, pair):
    """Greedy completions of the target by Hugging Face: pairs of prompt and completion ids."""
    random_ids = random.Random(3)
    prompts = [
        [random_ids.randrange(2, 1024) for _ in range(random_ids.randrange(1, 20))]
        for _ in range(NUM_PROMPTS)
    ]
    wanted = fork_server.call(
        "hugging_face", "complete", str(pair / "target"), prompts, COMPLETION_LENGTH
    )
    return list(zip(prompts, wanted, strict=True))


@pytest.fixture(scope="session")
def filled_contexts(fork_server, pair):
    """Prompts, and what the target alone writes until a short context is full."""
    random_ids = random.Random(5)
    lengths = [43, 42, 40, 37, 33, 28, 24, 19, 12, 5, 1, 39]
    prompts = [[random_ids.randrange(2, 1024) for _ in range(length)] for length in lengths]
    arguments = (str(pair / "target"), prompts, LONGEST_TEXT - min(lengths))
    found = fork_server.call("hugging_face", "complete", *arguments)
    return [
        (prompt, completion[: LONGEST_TEXT - len(prompt)])
        for prompt, completion in zip(prompts, found, strict=True)
    ]
