import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_eagle.reference.prompts import WORKLOADS, Prompt, load_prompts, load_shipped_prompts
from sgl_eagle_harness.errors import PromptError

GOOD = {"id": "qa-1", "workload": "qa", "turns": ["Why is the sky blue?"]}


def write(path: Path, *lines: object) -> Path:
    path.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    return path


def test_shipped_prompts_fill_every_workload_and_split():
    prompts = load_shipped_prompts()
    assert Counter((prompt.workload, prompt.split) for prompt in prompts) == {
        (workload, split): count
        for workload in WORKLOADS
        for split, count in (("tune", 24), ("held_out", 12))
    }
    assert len({prompt.turns for prompt in prompts}) == len(prompts)


def test_shipped_prompts_select_workload_and_split():
    prompts = load_shipped_prompts(["qa", "code"], "held_out")
    assert [prompt.workload for prompt in prompts] == ["qa"] * 12 + ["code"] * 12
    assert {prompt.split for prompt in prompts} == {"held_out"}


def test_shipped_summaries_carry_their_passage():
    for prompt in load_shipped_prompts(["summary"]):
        request, passage = prompt.turns[0].split("\n\n")
        assert len(request.split()) <= 15
        assert 80 <= len(passage.split()) <= 160


def test_files_are_read_in_order(tmp_path):
    first = write(tmp_path / "a.jsonl", GOOD, "", GOOD | {"id": "qa-2", "split": "held_out"})
    second = write(
        tmp_path / "b.jsonl", GOOD | {"id": "x", "category": "trivia", "turns": ["a", "b"]}
    )
    assert load_prompts([first, second]) == [
        Prompt(id="qa-1", workload="qa", turns=("Why is the sky blue?",)),
        Prompt(id="qa-2", workload="qa", split="held_out", turns=("Why is the sky blue?",)),
        Prompt(id="x", workload="qa", turns=("a", "b")),
    ]


@given(text=st.text().filter(str.strip))
def test_any_text_survives(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text(json.dumps(GOOD | {"turns": [text]}, ensure_ascii=False) + "\n", newline="")
    assert load_prompts([path])[0].turns == (text,)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: the line: Invalid JSON"),
        ("[]", "line 2: the line: .*object"),
        (GOOD | {"workload": "poetry"}, "line 2: workload: .*'chat', 'code', .*got 'poetry'"),
        (GOOD | {"split": "train"}, "line 2: split: .*'held_out', got 'train'"),
        (GOOD | {"turns": []}, r"line 2: turns: .*at least 1 item.*got \[\]"),
        (GOOD | {"turns": [" "]}, "line 2: turns.0: .*got ' '"),
        (GOOD | {"turns": "hello"}, "line 2: turns: .*valid array, got 'hello'"),
        (GOOD | {"id": 3}, "line 2: id: .*valid string, got 3"),
        (GOOD | {"answer": "42"}, "line 2: answer: Extra inputs are not permitted, got '42'"),
        ({"id": "a", "workload": "qa"}, "line 2: turns: Field required"),
        (GOOD | {"id": "first"}, "line 2: id 'first' was used before, in .*p.jsonl, line 1"),
    ],
    ids=str,
)
def test_bad_line_names_file_and_line(tmp_path, line, message):
    path = write(tmp_path / "p.jsonl", GOOD | {"id": "first"}, line)
    with pytest.raises(PromptError, match=rf"p\.jsonl, {message}"):
        load_prompts([path])


def test_id_may_not_repeat_across_files(tmp_path):
    paths = [write(tmp_path / name, GOOD) for name in ("a.jsonl", "b.jsonl")]
    with pytest.raises(PromptError, match=r"b\.jsonl, line 1: id 'qa-1' .*a\.jsonl, line 1"):
        load_prompts(paths)


@pytest.mark.parametrize("content", ["", "\n \n"], ids=["empty", "blank"])
def test_file_without_prompts_is_refused(tmp_path, content):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(PromptError, match=r"p\.jsonl: holds no prompt"):
        load_prompts([path])


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(PromptError, match=r"none\.jsonl: cannot be read: No such file"):
        load_prompts([tmp_path / "none.jsonl"])
    with pytest.raises(PromptError, match="cannot be read: Is a directory"):
        load_prompts([tmp_path])
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "caf\xe9"}')
    with pytest.raises(PromptError, match=r"latin\.jsonl: is not UTF-8 text \(byte 11\)"):
        load_prompts([tmp_path / "latin.jsonl"])
