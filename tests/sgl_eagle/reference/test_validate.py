"""What counts as validated, and the exit code that says so."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch installed")
pytest.importorskip("transformers", reason="needs transformers installed")

from sgl_eagle.reference import validate  # noqa: E402
from sgl_eagle.reference.comparison import StepComparison, TextComparison  # noqa: E402
from sgl_eagle.reference.recorder import RecordConfig  # noqa: E402
from sgl_eagle.reference.validate import PolicyValidation, Validation, static_specs  # noqa: E402


def validation(*, dtype="float32", num_equal=200, num_different=0):
    texts = TextComparison(
        num_prompts=10, num_equal=9 - num_different, num_near_ties=1, widest_gap=0.1
    )
    steps = StepComparison(
        num_prompts=10,
        num_steps=200,
        num_equal=num_equal,
        num_same_size=num_equal,
        num_off_text=3,
        num_uncovered=2,
    )
    each = PolicyValidation(policy="eagle2", texts=texts, steps=steps, accept_length=2.0)
    return Validation(
        dtype=dtype,
        near_tie_bound=0.25,
        step_tolerance=validate.STEP_TOLERANCE[dtype],
        policies=(each,),
    )


@pytest.mark.parametrize(
    ("changes", "passed"),
    [
        ({}, True),
        ({"num_different": 1}, False),
        ({"num_equal": 199}, False),
        ({"num_equal": 199, "dtype": "bfloat16"}, True),
        ({"num_equal": 198, "dtype": "bfloat16"}, False),
    ],
    ids=str,
)
def test_what_passes(changes, passed):
    assert validation(**changes).passed == passed


@pytest.mark.parametrize(("num_different", "code"), [(0, 0), (1, 1)], ids=str)
def test_exit_code_and_table(
    target_folder, good_draft, prompt_file, tmp_path, monkeypatch, capsys, num_different, code
):
    from sgl_eagle.cli import main

    result = validation(num_different=num_different)
    monkeypatch.setattr(validate, "validate_pair", lambda *_, **__: result)
    pair = ["--target", str(target_folder), "--draft", str(good_draft), "--dtype", "float32"]
    cost = str(tmp_path / "cost.json")
    assert main(["profile", "--out", cost, "--repeats", "1", "--context", "1", *pair]) == 0
    capsys.readouterr()
    files = ["--prompts", str(prompt_file), "--cost", cost]
    assert main(["validate", *files, *pair]) == code
    row = capsys.readouterr().out.splitlines()[2].split()
    assert row[:3] == ["eagle2", "10", str(9 - num_different)]
    assert row[3:] == ["1", str(num_different), "200", "200", "2", "2.00"]


def test_every_static_kind_that_the_recording_covers_is_validated():
    wide = static_specs(RecordConfig(num_steps=6, beams=(1, 4, 8)))
    assert list(wide) == ["chain-3", "eagle2-6-8-32", "eagle2-5-4-8", "eagle1-tree"]
    assert list(static_specs(RecordConfig(num_steps=2, beams=(1, 4)))) == [
        "chain-2",
        "eagle2-2-4-32",
    ]
