"""Dense recording: what is recorded in large batches is what the engine drafts live."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch installed")
pytest.importorskip("transformers", reason="needs transformers installed")

from sgl_eagle.reference import record  # noqa: E402
from sgl_eagle.reference.decode import Engine  # noqa: E402
from sgl_eagle.reference.record import RecordedText, decode_texts, record_text  # noqa: E402
from sgl_eagle.reference.sampling_config import GREEDY, Sampling  # noqa: E402
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy  # noqa: E402
from sgl_eagle_harness.policies.plain import PlainPolicy  # noqa: E402
from sgl_eagle_harness.policies.recording import RecordingPolicy  # noqa: E402
from sgl_eagle_harness.types import TreeLimits  # noqa: E402

PROMPT = (3, 1, 4, 1, 5)
POLICY = RecordingPolicy(num_steps=4, beams=(1, 2, 3, 4))


def spelled_paths(tokens, parents, present, scores):
    """{token path: score} of one row."""
    names, found = [], {}
    for token, parent, here, score in zip(tokens, parents, present, scores, strict=True):
        names.append((*(names[parent] if parent >= 0 else ()), int(token)))
        if here:
            found[names[-1]] = score
    return found


def recorded(pair, sampling, num_tokens=40):
    _, target, draft = pair
    plain = Engine(target, draft).generate(
        list(PROMPT),
        PlainPolicy(),
        max_new_tokens=num_tokens,
        stop_tokens=frozenset(),
        sampling=sampling,
    )
    text = RecordedText(
        prompt_id="a", workload="chat", prompt=PROMPT, completion=tuple(plain.tokens)
    )
    return text, record_text(target, draft, text, policy=POLICY, sampling=sampling)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, seed=4)], ids=["t0", "t1"])
@pytest.mark.parametrize("topk", POLICY.beams)
def test_every_live_tree_is_contained_in_the_recorded_one(tiny_pair, sampling, topk, monkeypatch):
    monkeypatch.setattr(record, "POSITIONS_PER_BATCH", 7)
    _, target, draft = tiny_pair
    text, trace = recorded(tiny_pair, sampling)
    views = []
    Engine(target, draft).generate(
        list(PROMPT),
        Eagle2Policy(limits=TreeLimits(num_steps=4, topk=topk, num_draft_tokens=2)),
        max_new_tokens=len(text.completion),
        stop_tokens=frozenset(),
        sampling=sampling,
        observe=views.append,
    )
    assert views
    for view in views:
        row, live = view.position, view.candidates
        mine = spelled_paths(
            trace.tokens[row], trace.parents[row], trace.depths[row] > 0, trace.step_log_probs[row]
        )
        theirs = spelled_paths(
            live.tokens[0], live.parents[0], live.valid[0], live.step_log_probs[0]
        )
        assert theirs.keys() <= mine.keys()
        for path, score in theirs.items():
            assert mine[path] == pytest.approx(score, abs=1e-3)


def test_rows_follow_the_text(eagle3_pair):
    text, trace = recorded(eagle3_pair, GREEDY)
    assert trace.next_token.tolist() == list(text.completion)
    assert trace.context_len.tolist() == list(range(4, 44))
    assert trace.target_log_probs is None


def test_target_probabilities_of_nodes_are_those_of_the_target(eagle3_pair):
    model, _, _ = eagle3_pair
    sampling = Sampling(temperature=0.7, seed=4)
    text, trace = recorded(eagle3_pair, sampling, num_tokens=12)
    row = 5
    context = [*text.prompt, *text.completion[:row]]
    paths = spelled_paths(
        trace.tokens[row], trace.parents[row], trace.depths[row] > 0, trace.target_log_probs[row]
    )
    for path, score in list(paths.items())[::7]:
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *path[:-1]]])).logits[0, -1]
        expected = torch.log_softmax(logits / 0.7, dim=-1)[path[-1]]
        assert score == pytest.approx(float(expected), abs=2e-3)


def test_lock_step_decoding_equals_decoding_one_by_one(eagle3_pair):
    _, target, draft = eagle3_pair
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 23, length).tolist()) for length in (2, 6, 11)]
    arguments = {"max_new_tokens": 30, "stop_tokens": frozenset([23]), "sampling": GREEDY}
    together = list(decode_texts(target, prompts, **arguments))[-1]
    alone = [
        Engine(target, draft).generate(list(prompt), PlainPolicy(), **arguments).tokens
        for prompt in prompts
    ]
    assert together == alone
