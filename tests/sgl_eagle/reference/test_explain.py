"""Controls: rounding explains what the shape of a pass does, and no defect of a tree."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch installed")
pytest.importorskip("transformers", reason="needs transformers installed")

from sgl_eagle.reference import verify  # noqa: E402
from sgl_eagle.reference.comparison import UnequalStep, first_difference  # noqa: E402
from sgl_eagle.reference.control import (  # noqa: E402
    count_spelled,
    engine_passes,
    even_passes,
    redraft_steps,
    rerun_text,
)
from sgl_eagle.reference.decode import Engine  # noqa: E402
from sgl_eagle.reference.explain import (  # noqa: E402
    PromptControl,
    StepDifference,
    TextDifference,
    last_place,
    tokens_needed,
)
from sgl_eagle.reference.target import KvCache  # noqa: E402
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy  # noqa: E402
from sgl_eagle_harness.policies.plain import PlainPolicy  # noqa: E402
from sgl_eagle_harness.types import NO_NODE, DraftTree, TreeLimits  # noqa: E402

STOP = frozenset([23])
WIDE = Eagle2Policy(limits=TreeLimits(num_steps=4, topk=4, num_draft_tokens=24))
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, 23, length).tolist() for length in (2, 3, 9, 17, 6, 4, 12, 8, 20, 30)]


@pytest.fixture(params=["float32", "bfloat16"])
def pair(request):
    name = {"float32": "eagle3_pair", "bfloat16": "bfloat16_pair"}[request.param]
    _, target, draft = request.getfixturevalue(name)
    return target, draft


def decode(pair, prompt, policy):
    return Engine(*pair).generate(prompt, policy, max_new_tokens=36, stop_tokens=STOP)


def text_differences(pair):
    """Of every prompt, against plain decoding; and how many drafts were accepted."""
    found = []
    num_correct_drafts = 0
    for prompt in PROMPTS:
        plain = decode(pair, prompt, PlainPolicy())
        run = decode(pair, prompt, WIDE)
        num_correct_drafts += sum(step.num_accept_tokens - 1 for step in run.steps)
        num_tokens = tokens_needed(plain, run, [])
        control = PromptControl(*pair, plain, num_tokens=num_tokens, prompt_id="p")
        found.append(control.explain_run(run, WIDE, [])[0])
    assert num_correct_drafts > 0, "nothing was ever accepted: the test shows nothing"
    return [difference for difference in found if difference is not None]


def test_rounding_explains_every_difference_of_a_sound_engine(pair):
    assert all(difference.explained for difference in text_differences(pair))


def test_a_mask_that_shows_siblings_is_not_explained(pair, monkeypatch):
    sound = verify.build_layout

    def leaky(parents, num_cached):
        layout = sound(parents, num_cached)
        layout.ancestors[:] = np.tril(np.ones_like(layout.ancestors))
        return layout

    monkeypatch.setattr(verify, "build_layout", leaky)
    unexplained = [each for each in text_differences(pair) if not each.explained]
    assert unexplained
    assert max(each.gap / (each.moved + each.rounding) for each in unexplained) > 4


def test_a_cache_that_is_not_compacted_is_not_explained(pair, monkeypatch):
    monkeypatch.setattr(KvCache, "compact", lambda *_: None)
    assert any(not each.explained for each in text_differences(pair))


@pytest.mark.parametrize("size", [None, 1, 3, 16])
def test_steps_drafted_from_a_rerun_are_the_engines(eagle3_pair, size):
    _, target, draft = eagle3_pair
    for prompt in PROMPTS:
        run = decode((target, draft), prompt, WIDE)
        passes = engine_passes(run) if size is None else even_passes(len(run.tokens), size)
        rerun = rerun_text(target, run.prompt, run.tokens, passes)
        expected = {step.position: step.num_accept_tokens for step in run.steps}
        arguments = {"text": run.tokens, "positions": set(expected)}
        redrafts = redraft_steps(draft, rerun, run, WIDE, **arguments)
        assert {at: each.num_accept_tokens for at, each in redrafts.items()} == expected


def test_a_rerun_predicts_the_text_it_reads(pair):
    target, _ = pair
    plain = decode(pair, PROMPTS[2], PlainPolicy())
    passes = even_passes(len(plain.tokens), 1)
    rerun = rerun_text(target, plain.prompt, plain.tokens, passes)
    assert rerun.logits.float().argmax(dim=-1).tolist() == list(plain.tokens)
    gaps = rerun.logits.float().topk(2).values
    assert (gaps[:, 0] - gaps[:, 1]).tolist() == list(plain.top_two_gaps)
    assert len(rerun.features) == len(plain.prompt) + len(plain.tokens) - 1


def test_features_of_the_wrong_nodes_are_not_explained(eagle3_pair, monkeypatch):
    _, target, draft = eagle3_pair
    sound = verify.verify_tree

    def shifted(*args, **options):
        verified = sound(*args, **options)
        return verify.Verified(outcome=verified.outcome, features=verified.features.roll(1, 0) * 2)

    monkeypatch.setattr("sgl_eagle.reference.decode.verify_tree", shifted)
    verdicts = []
    for prompt in PROMPTS:
        plain = decode((target, draft), prompt, PlainPolicy())
        run = decode((target, draft), prompt, WIDE)
        assert run.tokens == plain.tokens, "the draft's features must not touch the text"
        rerun = rerun_text(target, plain.prompt, plain.tokens, even_passes(len(plain.tokens), 50))
        positions = {step.position for step in run.steps}
        replayed = redraft_steps(draft, rerun, run, WIDE, text=plain.tokens, positions=positions)
        unequal = [
            UnequalStep(
                prompt_id="p",
                position=step.position,
                num_accept_tokens=step.num_accept_tokens,
                num_replayed=replayed[step.position].num_accept_tokens,
            )
            for step in run.steps
            if replayed[step.position].num_accept_tokens != step.num_accept_tokens
        ]
        num_tokens = tokens_needed(plain, run, unequal)
        control = PromptControl(target, draft, plain, num_tokens=num_tokens, prompt_id="p")
        _, differences = control.explain_run(run, WIDE, unequal)
        assert [each.position for each in differences] == [each.position for each in unequal]
        verdicts += [each.explained for each in differences]
    assert verdicts
    assert not any(verdicts)


@pytest.mark.parametrize(
    ("gap", "moved", "explained"),
    [
        (0.5, 0.5, True),
        (0.5, 0.375, True),
        (0.5, 0.25, False),
        (0.125, 0.0, True),
        (0.0, 0.0, True),
        (None, 0.0, False),
    ],
    ids=["moved as far", "but for rounding", "moved less", "rounding alone", "tie", "text ends"],
)
def test_a_text_is_explained_if_its_gap_is_moved_as_far(gap, moved, explained):
    difference = TextDifference(prompt_id="p", position=3, gap=gap, moved=moved, rounding=0.125)
    assert difference.explained == explained


@pytest.mark.parametrize(
    ("numbers", "dtype", "expected"),
    [
        ([17.0, -3.0], torch.bfloat16, 0.125),
        ([-33.0, 17.0], torch.bfloat16, 0.25),
        ([17.0], torch.float16, 2.0**-6),
        ([17.0], torch.float32, 2.0**-19),
        ([0.0], torch.float32, 2.0**-149),
    ],
    ids=str,
)
def test_last_place_is_that_of_the_largest_number(numbers, dtype, expected):
    assert last_place(torch.tensor(numbers, dtype=dtype)) == expected


@pytest.mark.parametrize(
    ("controls", "fewest", "most", "reproduced", "explained"),
    [
        ((4, 2, 2), 2, 2, True, True),
        ((2, 2, 6), 2, 3, False, False),
        ((2, 2, 2), 1, 4, False, True),
        ((6, 6), 5, 6, False, False),
    ],
    ids=str,
)
def test_a_step_is_explained_within_the_reach_of_rounding(
    controls, fewest, most, reproduced, explained
):
    step = StepDifference(
        prompt_id="p",
        position=3,
        num_accept_tokens=4,
        num_replayed=2,
        controls=controls,
        moved=0.1,
        fewest=fewest,
        most=most,
    )
    assert (step.reproduced, step.explained) == (reproduced, explained)


def test_a_text_that_ends_early_is_not_explained(eagle3_pair):
    _, target, draft = eagle3_pair
    plain = decode((target, draft), PROMPTS[2], PlainPolicy())
    short = Engine(target, draft).generate(
        PROMPTS[2], WIDE, max_new_tokens=12, stop_tokens=frozenset()
    )
    assert first_difference(plain.tokens, short.tokens) == 12
    control = PromptControl(target, draft, plain, num_tokens=13, prompt_id="p")
    difference, _ = control.explain_run(short, WIDE, [])
    assert difference == TextDifference(
        prompt_id="p", position=12, gap=None, moved=0.0, rounding=0.0
    )


def test_count_spelled_follows_one_chain():
    tree = DraftTree(
        tokens=np.array([9, 5, 6, 6, 7]),
        parents=np.array([NO_NODE, 0, 0, 1, 2]),
        depths=np.array([0, 1, 1, 2, 2]),
        path_log_confidence=np.zeros(5, np.float32),
        columns=np.array([NO_NODE, 0, 1, 2, 3]),
    )
    assert count_spelled(tree, [5, 6, 7]) == 2
    assert count_spelled(tree, [6, 7]) == 2
    assert count_spelled(tree, [5]) == 1
    assert count_spelled(tree, [7, 7]) == 0
