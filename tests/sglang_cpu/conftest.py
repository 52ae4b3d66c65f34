import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from policy_files import write_policies
from server_process import COMPLETION_LENGTH, STAND_IN_ATTENTION, ForkServer

NUM_PROMPTS = 12


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
def misled(fork_server, pair, policies, completions, tmp_path_factory):
    """What a wrong tree mask spoils: prompts, the right completions and the first wrong tokens.

    Sorted by the index of that token, the earliest first.
    """
    log = tmp_path_factory.mktemp("misled") / "log"
    flags = ("--sgl-eagle-policy", str(policies["irregular"]))
    with fork_server.serve(pair, log, *flags, fault="break_tree_mask") as server:
        answers = server.complete_all([prompt for prompt, _ in completions], concurrency=4)
    found = []
    for (prompt, wanted), answer in zip(completions, answers, strict=True):
        pairs = enumerate(zip(answer["output_ids"], wanted, strict=True))
        first = next((index for index, (token, right) in pairs if token != right), None)
        if first is not None:
            found.append((prompt, wanted, first))
    return sorted(found, key=lambda row: row[2])
