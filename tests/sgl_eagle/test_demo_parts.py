"""Parts of the demo that its end-to-end test sees only from afar."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch installed")
pytest.importorskip("transformers", reason="needs transformers installed")

from sgl_eagle.demo.drawn_trees import draw_best_step  # noqa: E402
from sgl_eagle.demo.stages import StageClock  # noqa: E402
from sgl_eagle.reference.measure import encode_prompts  # noqa: E402
from sgl_eagle.reference.prompts import load_prompts  # noqa: E402
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy  # noqa: E402
from sgl_eagle_harness.policies.plain import PlainPolicy  # noqa: E402
from sgl_eagle_harness.types import TreeLimits  # noqa: E402


@pytest.fixture(scope="module")
def prompt(loaded_pair, prompt_file):
    return encode_prompts(loaded_pair, load_prompts([prompt_file]), max_new_tokens=40)[0]


def test_drawn_step_is_a_real_one_with_the_longest_accepted_path(loaded_pair, prompt):
    policy = Eagle2Policy(limits=TreeLimits(num_steps=4, topk=2, num_draft_tokens=8))
    tree = draw_best_step(loaded_pair, prompt, policy, max_new_tokens=40)
    assert (tree.workload, tree.policy_name) == ("chat", "eagle2-4-2-8")
    assert len(tree.nodes) == 2 + 3 * 4
    assert sum(node.state != "pruned" for node in tree.nodes) == 7
    assert tree.num_correct_drafts == 4
    accepted = [node.token_text.strip() for node in tree.nodes if node.state == "accepted"]
    from sgl_eagle.reference.decode import Engine

    plain = Engine(loaded_pair.target, None).generate(
        list(prompt.tokens), PlainPolicy(), max_new_tokens=40, stop_tokens=loaded_pair.stop_tokens
    )
    words = loaded_pair.decode(plain.tokens).split()
    said = [tree.root_text, *accepted, tree.bonus_text]
    assert words[tree.position - 1 : tree.position + 5] == [text.strip() for text in said]
    assert all(node.accept_prob is None for node in tree.nodes)


def test_nothing_is_drawn_of_plain_decoding(loaded_pair, prompt):
    assert draw_best_step(loaded_pair, prompt, PlainPolicy(), max_new_tokens=8) is None


def test_stages_keep_their_order_time_and_notes():
    clock = StageClock()
    with clock.stage("record") as notes:
        notes += ["8 prompts", "512 positions"]
    with clock.stage("tune"):
        pass
    assert [(stage.name, stage.note) for stage in clock.stages] == [
        ("record", "8 prompts, 512 positions"),
        ("tune", None),
    ]
    assert all(stage.seconds >= 0 for stage in clock.stages)
