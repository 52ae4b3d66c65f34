"""Lossless decoding: every policy emits what plain decoding emits."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch installed")
pytest.importorskip("transformers", reason="needs transformers installed")

from sgl_eagle.reference.decode import Engine  # noqa: E402
from sgl_eagle.reference.sampling_config import GREEDY, Sampling  # noqa: E402
from sgl_eagle_harness.errors import PromptError  # noqa: E402
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy  # noqa: E402
from sgl_eagle_harness.policies.plain import PlainPolicy  # noqa: E402
from sgl_eagle_harness.policies.static import StaticPolicy  # noqa: E402
from sgl_eagle_harness.types import TreeLimits  # noqa: E402

STOP = frozenset([23])
POLICIES = {
    "chain": StaticPolicy.chain(3),
    "eagle1-tree": StaticPolicy.eagle1(),
    "eagle2-wide": Eagle2Policy(limits=TreeLimits(num_steps=5, topk=8, num_draft_tokens=40)),
    "eagle2-chain": Eagle2Policy(limits=TreeLimits(num_steps=4, topk=1, num_draft_tokens=5)),
    "eagle2-one-step": Eagle2Policy(limits=TreeLimits(num_steps=1, topk=4, num_draft_tokens=5)),
}


class EveryThirdPlain(Eagle2Policy):
    """Switches between speculation and plain decoding, so that tokens pile up for draft-extend."""

    def should_speculate(self, batch):
        return np.array(batch.context_len % 3 != 0)


POLICIES["switching"] = EveryThirdPlain(limits=TreeLimits(num_steps=3, topk=4, num_draft_tokens=12))


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 23, length).tolist() for length in (2, 3, 9, 17)]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, seed=4)], ids=["t0", "t1"])
def test_text_equals_plain_decoding(tiny_pair, policy, sampling):
    _, target, draft = tiny_pair
    engine = Engine(target, draft)
    num_correct_drafts = 0
    for prompt in prompts():
        arguments = {"max_new_tokens": 50, "stop_tokens": STOP, "sampling": sampling}
        plain = engine.generate(prompt, PlainPolicy(), **arguments)
        drafted = engine.generate(prompt, policy, **arguments)
        assert drafted.tokens == plain.tokens
        assert sum(step.num_accept_tokens for step in drafted.steps) == len(plain.tokens) - 1
        num_correct_drafts += sum(step.num_accept_tokens - 1 for step in drafted.steps)
    assert num_correct_drafts > 0, "nothing was ever accepted: the test shows nothing"


def test_plain_decoding_equals_hugging_face(eagle3_pair):
    model, target, draft = eagle3_pair
    for prompt in prompts():
        plain = Engine(target, draft).generate(
            prompt, PlainPolicy(), max_new_tokens=40, stop_tokens=STOP
        )
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False
        )
        assert list(plain.tokens) == expected[0, len(prompt) :].tolist()
        assert len(plain.top_two_gaps) == len(plain.tokens)


def test_stop_token_and_length_limit_cut_inside_an_accepted_run(eagle3_pair):
    _, target, draft = eagle3_pair
    engine, prompt = Engine(target, draft), prompts()[2]
    policy = POLICIES["eagle2-wide"]
    whole = engine.generate(prompt, policy, max_new_tokens=50, stop_tokens=frozenset())
    long_step = next(step for step in whole.steps if step.num_accept_tokens >= 2)
    stop = whole.tokens[long_step.position]
    first = whole.tokens.index(stop)
    cut = engine.generate(prompt, policy, max_new_tokens=50, stop_tokens=frozenset([stop]))
    assert cut.tokens == whole.tokens[: first + 1]
    limit = long_step.position + 1
    short = engine.generate(prompt, policy, max_new_tokens=limit, stop_tokens=frozenset())
    assert short.tokens == whole.tokens[:limit]
    assert short.steps[-1].num_accept_tokens < long_step.num_accept_tokens


def test_wider_trees_never_accept_less_from_the_same_position(eagle3_pair):
    _, target, draft = eagle3_pair
    engine, prompt = Engine(target, draft), prompts()[3]
    first_steps = []
    for num_draft_tokens in (2, 5, 9, 17, 33):
        limits = TreeLimits(num_steps=4, topk=4, num_draft_tokens=num_draft_tokens)
        views = []
        engine.generate(
            prompt,
            Eagle2Policy(limits=limits),
            max_new_tokens=12,
            stop_tokens=frozenset(),
            observe=views.append,
        )
        first_steps.append(views[0].outcome.num_correct_drafts)
    assert first_steps == sorted(first_steps)


def test_step_times_add_up(eagle3_pair):
    _, target, draft = eagle3_pair
    generation = Engine(target, draft).generate(
        prompts()[1], POLICIES["eagle2-wide"], max_new_tokens=20, stop_tokens=frozenset()
    )
    for step in generation.steps:
        parts = step.extend_us + step.draft_us + step.decide_us + step.verify_us
        assert step.total_us == pytest.approx(parts)
        assert min(step.extend_us, step.decide_us, step.verify_us) > 0
        assert len(step.widths) == 4


def test_prompts_that_do_not_fit_are_refused(eagle3_pair):
    _, target, draft = eagle3_pair
    engine = Engine(target, draft)
    for prompt in ([1], [1] * 250):
        with pytest.raises(
            PromptError, match=f"at least 2 tokens.* at most 236 .* got {len(prompt)}"
        ):
            engine.generate(prompt, PlainPolicy(), max_new_tokens=20, stop_tokens=STOP)
