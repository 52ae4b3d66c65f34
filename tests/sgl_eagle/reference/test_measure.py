"""Runs side by side, and the two comparisons of them."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch installed")
pytest.importorskip("transformers", reason="needs transformers installed")

from sgl_eagle.reference.comparison import (  # noqa: E402
    UnequalStep,
    compare_steps,
    compare_texts,
)
from sgl_eagle.reference.decode import Engine, Generation  # noqa: E402
from sgl_eagle.reference.measure import encode_prompts, measure_policies  # noqa: E402
from sgl_eagle.reference.prompts import load_prompts  # noqa: E402
from sgl_eagle.reference.record_config import RecordConfig  # noqa: E402
from sgl_eagle.reference.recorder import record_prompts  # noqa: E402
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy  # noqa: E402
from sgl_eagle_harness.policies.plain import PlainPolicy  # noqa: E402
from sgl_eagle_harness.trace_schema import PromptSource  # noqa: E402
from sgl_eagle_harness.trace_store import read_dense_trace  # noqa: E402
from sgl_eagle_harness.types import TreeLimits  # noqa: E402
from sgl_eagle_tuner.replay import replay_positions  # noqa: E402

POLICY = Eagle2Policy(limits=TreeLimits(num_steps=3, topk=2, num_draft_tokens=5))


def generation(tokens, gaps=()):
    return Generation(
        prompt=(1, 2), tokens=tuple(tokens), top_two_gaps=tuple(gaps), steps=(), prefill_us=0.0
    )


@pytest.mark.parametrize(
    ("other", "equal", "near_ties", "different", "gap"),
    [
        ([5, 6, 7], 1, 0, 0, None),
        ([5, 9, 7], 0, 1, 0, 0.01),
        ([9, 6, 7], 0, 0, 1, 2.0),
        ([5, 6], 0, 0, 1, 3.0),
        ([5, 6, 7, 8], 0, 0, 1, 3.0),
    ],
    ids=["equal", "near tie", "different", "shorter", "longer"],
)
def test_the_first_difference_decides(other, equal, near_ties, different, gap):
    plain = generation([5, 6, 7], gaps=[2.0, 0.01, 3.0])
    found = compare_texts([plain], [generation(other)], bound=0.1)
    assert (found.num_equal, found.num_near_ties) == (equal, near_ties)
    assert (found.num_different, found.widest_gap) == (different, gap)


@pytest.fixture(scope="module")
def prompts(prompt_file):
    return load_prompts([prompt_file])[:4]


@pytest.fixture(scope="module")
def measured(loaded_pair, prompts):
    runs = []
    found = measure_policies(
        Engine(loaded_pair.target, loaded_pair.draft),
        encode_prompts(loaded_pair, prompts, max_new_tokens=24),
        {"plain": PlainPolicy(), "tree": POLICY},
        max_new_tokens=24,
        stop_tokens=loaded_pair.stop_tokens,
        on_run=lambda: runs.append(None),
        num_repeats=3,
    )
    assert len(runs) == 4 * 2 * 3
    return found


@pytest.fixture(scope="module")
def replayed(loaded_pair, prompts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    config = RecordConfig(num_steps=3, beams=(1, 2), max_new_tokens=24)
    source = PromptSource(kind="text", files=())
    record_prompts(
        loaded_pair, prompts, folder, config, source=source, on_tokens=lambda _count: None
    )
    trace = read_dense_trace(folder)
    return trace, replay_positions(trace, POLICY)


def test_totals_leave_prefill_out(measured):
    plain, tree = measured["plain"].totals, measured["tree"].totals
    assert plain.num_tokens.tolist() == [23] * 4 == tree.num_tokens.tolist()
    assert plain.accept_length == 1.0
    assert tree.accept_length == pytest.approx(4 * 23 / len(measured["tree"].steps))
    assert tree.accept_length > 1.5
    assert (plain.elapsed_us > 0).all()


def test_engine_steps_agree_with_replay(measured, replayed):
    found = compare_steps(*replayed, measured["tree"])
    assert found.num_prompts == 4
    assert found.num_steps == len(measured["tree"].steps)
    assert found.num_equal == found.num_same_size == found.num_steps
    assert found.num_off_text == found.num_uncovered == 0


def test_steps_that_differ_from_replay_are_counted(measured, replayed):
    trace, table = replayed
    wrong = replace(table, num_accept_tokens=table.num_accept_tokens + 1)
    found = compare_steps(trace, wrong, measured["tree"])
    assert found.num_equal == 0
    assert len(found.unequal) == found.num_steps
    first = measured["tree"].generations[0].steps[0]
    assert found.unequal[0] == UnequalStep(
        prompt_id=measured["tree"].prompts[0].id,
        position=first.position,
        num_accept_tokens=first.num_accept_tokens,
        num_replayed=first.num_accept_tokens + 1,
    )
    hidden = replace(table, uncovered=np.ones_like(table.uncovered))
    found = compare_steps(trace, hidden, measured["tree"])
    assert (found.num_prompts, found.num_steps) == (0, 0)
    assert found.num_uncovered == len(measured["tree"].steps)


def test_steps_off_the_recorded_text_are_left_out(measured, replayed):
    trace, table = replayed
    text = trace.next_token.copy()
    text[2] = (text[2] + 1) % 96  # the engine of the first prompt leaves the text at once
    found = compare_steps(replace(trace, next_token=text), table, measured["tree"])
    steps = measured["tree"].generations[0].steps
    off_text = sum(step.position + step.num_accept_tokens > 2 for step in steps)
    assert found.num_off_text == off_text > 0
    assert found.num_steps == len(measured["tree"].steps) - off_text


def test_plain_steps_are_not_compared(measured, replayed):
    assert compare_steps(*replayed, measured["plain"]).num_steps == 0
