"""After plain rounds the draft's cache is what a prefill of the same text would have left."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from draft_cache import FOLDER_VARIABLE

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

WINDOW, NUM_PROMPTS, CONCURRENCY, LENGTH = 16, 6, 3, 36
"""More than two windows are decoded, of which the draft has seen one when a request ends."""


def _complete(server, index, prompt):
    # Requests join and leave a batch whose others are in the middle of a window.
    return server.complete(prompt, max_new_tokens=LENGTH + 5 * (index % CONCURRENCY))


@pytest.mark.parametrize(
    ("policy", "fault", "is_right"),
    [
        ("price_dear", "note", True),
        ("price_late", "note", True),
        ("price_dear", "note_where_whole_passes_catch_up", True),
        ("price_dear", "note_where_nothing_is_written", False),
        ("price_dear", "note_where_features_are_anothers", False),
    ],
)
def test_the_draft_has_seen_what_was_decoded_plainly(
    policy, fault, is_right, fork_server, pair, policies, completions, tmp_path
):
    prompts = [prompt for prompt, _ in completions[:NUM_PROMPTS]]
    flags = ("--sgl-eagle-policy", str(policies[policy]))
    variables = {FOLDER_VARIABLE: str(tmp_path)}
    fault = f"draft_cache.{fault}"
    with fork_server.serve(pair, tmp_path / "log", *flags, fault=fault, **variables) as server:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            answers = list(pool.map(partial(_complete, server), range(len(prompts)), prompts))
        server.drain()
        texts = [
            prompt + answer["output_ids"] for prompt, answer in zip(prompts, answers, strict=True)
        ]
        prefilled = server.complete_all(texts, concurrency=1, max_new_tokens=1)
    whole_pass = "whole passes of LlamaForCausalLMEagle3" in (tmp_path / "log").read_text()
    assert whole_pass == fault.endswith("whole_passes_catch_up")
    are_right = []
    for prompt, answer, reference in zip(prompts, answers, prefilled, strict=True):
        found, wanted = (
            np.load(tmp_path / f"{done['meta_info']['id']}.npy") for done in (answer, reference)
        )
        assert len(found) >= len(prompt) + WINDOW
        found = found[: len(wanted)]  # of an accepted run, the token limit cuts some off
        assert np.allclose(found[: len(prompt)], wanted[: len(prompt)], atol=1e-4)
        are_right.append(np.allclose(found, wanted[: len(found)], atol=1e-4))
    assert are_right == [is_right] * NUM_PROMPTS
