"""What counts as validated, what the command prints, and its exit code on real runs."""

import json

import pytest

torch = pytest.importorskip("torch", reason="needs torch installed")
pytest.importorskip("transformers", reason="needs transformers installed")

from sgl_eagle.cli import main  # noqa: E402
from sgl_eagle.reference import validate, verify  # noqa: E402
from sgl_eagle.reference.comparison import StepComparison  # noqa: E402
from sgl_eagle.reference.explain import StepDifference, TextDifference  # noqa: E402
from sgl_eagle.reference.record_config import RecordConfig  # noqa: E402
from sgl_eagle.reference.validate import PolicyValidation, Validation, static_specs  # noqa: E402


def text(*, moved):
    return TextDifference(prompt_id="chat-1", position=7, gap=0.25, moved=moved, rounding=0.03125)


def step(*, controls, most=2):
    return StepDifference(
        prompt_id="chat-2",
        position=4,
        num_accept_tokens=3,
        num_replayed=1,
        controls=controls,
        moved=0.125,
        fewest=1,
        most=most,
    )


def validation(*, texts=(), steps=()):
    compared = StepComparison(
        num_prompts=10,
        num_steps=200,
        num_equal=200 - len(steps),
        num_same_size=190,
        num_off_text=3,
        num_uncovered=2,
        unequal=(),
    )
    each = PolicyValidation(
        policy="eagle2",
        num_prompts=10,
        texts=tuple(texts),
        steps=compared,
        step_differences=tuple(steps),
        accept_length=2.0,
    )
    return Validation(dtype="bfloat16", control_sizes=(2, 8), policies=(each,))


@pytest.mark.parametrize(
    ("findings", "passed"),
    [
        ({}, True),
        ({"texts": [text(moved=0.25)], "steps": [step(controls=(1, 3))]}, True),
        ({"texts": [text(moved=0.25), text(moved=0.125)]}, False),
        ({"steps": [step(controls=(1, 2))]}, False),
    ],
    ids=["equal", "explained", "text", "step"],
)
def test_what_passes(findings, passed):
    assert validation(**findings).passed == passed


@pytest.fixture(scope="module")
def cost_file(target_folder, good_draft, tmp_path_factory):
    """Costs of the tiny pair for each dtype, each measured once."""
    files = {}

    def measure(dtype):
        if dtype not in files:
            files[dtype] = str(tmp_path_factory.mktemp("costs") / "cost.json")
            models = ["--target", str(target_folder), "--draft", str(good_draft)]
            options = ["--repeats", "1", "--context", "1", "64", "--dtype", dtype, "--quiet"]
            assert main(["profile", "--out", files[dtype], *models, *options]) == 0
        return files[dtype]

    return measure


@pytest.fixture
def run_validate(target_folder, good_draft, prompt_file, cost_file, capsys):
    """Run the command on the tiny pair; returns its exit code and its stdout."""

    def run(*options, dtype="float32"):
        models = ["--target", str(target_folder), "--draft", str(good_draft), "--dtype", dtype]
        files = ["--prompts", str(prompt_file), "--cost", cost_file(dtype)]
        capsys.readouterr()
        code = main(["validate", *files, *models, *options, "--quiet"])
        return code, capsys.readouterr().out

    return run


def test_unexplained_differences_are_counted_listed_and_exit_1(run_validate, monkeypatch):
    result = validation(
        texts=[text(moved=0.25), text(moved=0.125)],
        steps=[step(controls=(3,)), step(controls=(1,), most=3), step(controls=(1, 2))],
    )
    monkeypatch.setattr(validate, "validate_pair", lambda *_, **__: result)
    code, out = run_validate()
    assert code == 1
    lines = out.splitlines()
    assert lines[2].split() == [
        "eagle2",
        "10",
        "8",
        "1",
        "1",
        "200",
        "197",
        "2",
        "1",
        "3",
        "2",
        "2.00",
    ]
    assert (
        "eagle2, chat-1, token 7: logit gap 0.25 crossed, the controls move it by 0.125, "
        "the last place is 0.03125"
    ) in lines
    assert "eagle2, chat-2, step at token 4: accepted 3, replay 1, controls 1 to 2" in lines
    assert lines[-1] == "FAILED"
    policy = json.loads(run_validate("--format", "json")[1])["policies"][0]
    counts = {
        part: {name: value for name, value in policy[part].items() if name != "differences"}
        for part in ("texts", "steps")
    }
    assert counts == {
        "texts": {"num_prompts": 10, "num_equal": 8, "num_explained": 1, "num_unexplained": 1},
        "steps": {
            "num_prompts": 10,
            "num_steps": 200,
            "num_equal": 197,
            "num_reproduced": 1,
            "num_explained": 2,
            "num_unexplained": 1,
            "num_same_size": 190,
            "num_off_text": 3,
            "num_uncovered": 2,
        },
    }
    assert policy["texts"]["differences"][1] == {
        "prompt_id": "chat-1",
        "position": 7,
        "gap": 0.25,
        "moved": 0.125,
        "rounding": 0.03125,
        "explained": False,
    }


SMALL = ("--limit", "2", "--max-new-tokens", "16", "--format", "json")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sound_engine_is_validated(run_validate, dtype):
    code, out = run_validate(*SMALL, dtype=dtype)
    result = json.loads(out)
    assert (code, result["passed"]) == (0, True)
    names = [policy["policy"] for policy in result["policies"]]
    assert names == ["chain-3", "eagle2-6-8-32", "eagle2-5-4-8", "eagle1-tree", "price"]
    assert all(policy["steps"]["num_steps"] > 0 for policy in result["policies"][:4])
    assert result["policies"][0]["accept_length"] > 1.5
    if dtype == "float32":
        assert all(p["steps"]["num_steps"] == p["steps"]["num_equal"] for p in result["policies"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_reads_the_wrong_node_is_not(run_validate, monkeypatch, dtype):
    sound = verify.walk_tree
    monkeypatch.setattr(
        verify, "walk_tree", lambda tree, logits, *rest: sound(tree, logits.roll(1, 0), *rest)
    )
    code, out = run_validate(*SMALL, dtype=dtype)
    assert code == 1
    assert any(policy["texts"]["num_unexplained"] for policy in json.loads(out)["policies"])


def test_every_static_kind_that_the_recording_covers_is_validated():
    wide = static_specs(RecordConfig(num_steps=6, beams=(1, 4, 8)))
    assert list(wide) == ["chain-3", "eagle2-6-8-32", "eagle2-5-4-8", "eagle1-tree"]
    assert list(static_specs(RecordConfig(num_steps=2, beams=(1, 4)))) == [
        "chain-2",
        "eagle2-2-4-32",
    ]
