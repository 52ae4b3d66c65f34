"""Files appear whole or not at all, and a folder has one command that fills it."""

import os
import subprocess
import sys

import pytest

from sgl_eagle_harness.atomic_file import replace_when_done, write_text
from sgl_eagle_harness.errors import OutputError
from sgl_eagle_harness.output_folder import sole_writer


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / "runs").mkdir()
    link = tmp_path / "latest.json"
    link.symlink_to("runs/7.json")
    for text in ("first", "second"):
        write_text(link, text)
        assert link.is_symlink()
        assert (tmp_path / "runs" / "7.json").read_text() == text
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["7.json"]


def test_links_in_a_circle_are_replaced(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    write_text(tmp_path / "a", "text")
    assert (tmp_path / "a").read_text() == "text"


@pytest.mark.parametrize(
    ("error", "seen", "message"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (
            OSError(28, "No space left on device"),
            OutputError,
            r"cannot write .*policy\.json: .*No sp",
        ),
    ],
    ids=["interrupt", "full disk"],
)
def test_what_fails_half_way_leaves_the_older_file_alone(tmp_path, error, seen, message):
    path = tmp_path / "policy.json"
    path.write_text("older")

    def write_half(path):
        with replace_when_done(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(seen, match=message):
        write_half(path)
    with pytest.raises(seen, match=message):
        write_half(tmp_path / "new" / "deep" / "policy.json")
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


WRITER = (
    "import sys\n"
    "from pathlib import Path\n"
    "from sgl_eagle_harness.atomic_file import write_text\n"
    "for _ in range(100): write_text(Path(sys.argv[1]), sys.argv[2] * 50_000)\n"
)


def test_a_file_that_two_processes_write_is_always_that_of_one(tmp_path):
    path = tmp_path / "policy.json"
    write_text(path, "a")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), letter], env=environment)
        for letter in "ab"
    ]
    while any(writer.poll() is None for writer in writers):
        assert path.read_text() in {"a", "a" * 50_000, "b" * 50_000}
    assert [writer.returncode for writer in writers] == [0, 0]
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_filled_by_one_at_a_time(tmp_path):
    folder = tmp_path / "run"
    with sole_writer(folder):
        with (
            pytest.raises(OutputError, match=f"{folder} is being filled by another command"),
            sole_writer(folder),
        ):
            pass
        (folder / "cost.json").write_text("{}")
    with sole_writer(folder):
        assert [path.name for path in folder.iterdir()] == ["cost.json"]


def test_a_folder_that_stays_empty_is_removed_with_its_parents(tmp_path):
    (tmp_path / "there").mkdir()
    with sole_writer(tmp_path / "new" / "deep"), sole_writer(tmp_path / "there"):
        assert (tmp_path / "new" / "deep").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(OutputError, match=r"file.deep cannot be written: Not a directory"),
        sole_writer(tmp_path / "file" / "deep"),
    ):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_lock_ends_with_its_process(tmp_path):
    pid = os.fork()
    if pid == 0:
        with sole_writer(tmp_path):
            os._exit(0)  # as if killed
    assert os.waitpid(pid, 0)[1] == 0
    with sole_writer(tmp_path):
        pass
