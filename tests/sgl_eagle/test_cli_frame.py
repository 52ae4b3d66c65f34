import argparse
import importlib.machinery
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from sgl_eagle.cli.frame import main as frame
from sgl_eagle.cli.frame.arguments import (
    UsageError,
    naming_flags,
    non_negative_int,
    positive_int,
    seed_number,
)
from sgl_eagle.cli.frame.commands import COMMANDS, load_command, read_help
from sgl_eagle.cli.frame.output import render_table, write_result
from sgl_eagle.cli.frame.paths import (
    require_not_read,
    require_temporary_folder,
    require_writable,
    require_writable_folder,
)
from sgl_eagle.cli.frame.progress import progress
from sgl_eagle_harness.errors import OutputError, TraceError


@pytest.fixture
def probe(monkeypatch):
    """A command whose `run` the test sets."""
    name = "sgl_eagle.cli.probe"
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, None))
    module.HELP = "a command of the tests"
    module.add_arguments = lambda parser: parser.add_argument("--cost", required=True)
    module.run = lambda _: 0
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(frame, "COMMANDS", ("probe",))
    return module


def raising(error):
    def run(_):
        raise error

    return run


def run_process(*arguments, stdout=subprocess.PIPE):
    return subprocess.run(
        [sys.executable, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
        timeout=300,
    )


def test_success_returns_what_the_command_returned(probe):
    probe.run = lambda args: 0 if args.cost == "c.json" else 1
    assert frame.main(["probe", "--cost", "c.json"]) == 0
    assert frame.main(["probe", "--cost=d.json"]) == 1


def test_user_error_is_one_line_on_stderr(probe, capsys):
    probe.run = raising(TraceError("t.parquet, row 3: depth 2 below a root"))
    assert frame.main(["probe", "--cost", "c"]) == 1
    assert capsys.readouterr() == (
        "",
        "sgl-eagle probe: error: t.parquet, row 3: depth 2 below a root\n",
    )


def test_debug_adds_the_traceback(probe, capsys):
    probe.run = raising(TraceError("broken"))
    assert frame.main(["probe", "--cost", "c", "--debug"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_usage_error_exits_with_2(probe, capsys):
    probe.run = raising(UsageError("--a needs --b"))
    assert frame.main(["probe", "--cost", "c"]) == 2
    assert "--a needs --b" in capsys.readouterr().err


def test_defects_keep_their_traceback(probe):
    probe.run = raising(ZeroDivisionError("a defect"))
    with pytest.raises(ZeroDivisionError, match="a defect"):
        frame.main(["probe", "--cost", "c"])


def test_interrupt_is_one_line_and_130(probe, capsys):
    probe.run = raising(KeyboardInterrupt())
    assert frame.main(["probe", "--cost", "c"]) == 130
    assert capsys.readouterr().err == "sgl-eagle probe: interrupted\n"


def test_an_interrupt_before_anything_is_loaded_is_one_line():
    code = (
        "import sys\n"
        "class CtrlC:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'sgl_eagle.cli.frame.main':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, CtrlC())\n"
        "from sgl_eagle.cli import main\n"
        "sys.exit(main(['tune', '--help']))\n"
    )
    done = run_process("-c", code)
    assert (done.returncode, done.stderr) == (130, "sgl-eagle: interrupted\n")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_termination_ends_like_an_interrupt(probe, capsys, monkeypatch, name):
    number = getattr(signal, name)
    cleaned = []

    def run(_):
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        finally:
            cleaned.append(True)

    probe.run = run
    monkeypatch.setattr(sys, "argv", ["sgl-eagle", "probe", "--cost", "c"])
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert frame.main() == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert cleaned == [True]
    assert capsys.readouterr().err == f"sgl-eagle probe: terminated by {name}\n"


def test_ignored_signals_stay_ignored(probe, monkeypatch):
    def run(_):
        os.kill(os.getpid(), signal.SIGHUP)
        return 0

    probe.run = run
    monkeypatch.setattr(sys, "argv", ["sgl-eagle", "probe", "--cost", "c"])
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert frame.main() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_missing_torch_names_the_extra(probe, capsys):
    probe.run = raising(ModuleNotFoundError("No module named 'torch'", name="torch.nn"))
    assert frame.main(["probe", "--cost", "c"]) == 1
    assert 'needs torch, which is not installed: pip install "sgl-eagle[reference]"' in (
        capsys.readouterr().err
    )


def test_missing_module_of_no_extra_is_a_defect(probe):
    probe.run = raising(ModuleNotFoundError("No module named 'typo'", name="typo"))
    with pytest.raises(ModuleNotFoundError, match="typo"):
        frame.main(["probe", "--cost", "c"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["prob"], "there is no command 'prob'; did you mean probe?"),
        (["probe", "--csot", "c"], "unknown option --csot; did you mean --cost?"),
        (["probe", "--cst=c"], "unknown option --cst; did you mean --cost?"),
        (["probe", "--zzzzzz"], "unknown option --zzzzzz\n"),
        (["probe", "--cos", "c"], "unknown option --cos; did you mean --cost?"),
        (["probe"], "--cost"),
        (["probe", "--cost", "c", "--format", "yaml"], "'json'"),
        (["probe", "--cost", "c", "extra"], "extra"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("probe")
def test_wrong_usage_exits_with_2_and_says_what_was_meant(capsys, argv, message):
    with pytest.raises(SystemExit, match="2"):
        frame.main(argv)
    assert message in capsys.readouterr().err


def test_options_after_double_dash_are_values(probe):
    probe.add_arguments = lambda parser: parser.add_argument("words", nargs="*")
    probe.run = lambda args: 0 if args.words == ["--any"] else 1
    assert frame.main(["probe", "--", "--any"]) == 0


def test_no_command_prints_help_on_stderr(capsys):
    assert frame.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "sgl-eagle COMMAND [options]" in err


@pytest.mark.parametrize(
    ("flags", "shown"),
    [([], {"info"}), (["--quiet"], set()), (["--debug"], {"info", "debug"})],
    ids=["default", "quiet", "debug"],
)
def test_logs_go_to_stderr_at_the_chosen_level(probe, capsys, flags, shown):
    def run(_):
        logger = logging.getLogger("sgl_eagle_tuner.study")
        logger.debug("detail debug")
        logger.info("detail info")
        return 0

    probe.run = run
    frame.main(["probe", "--cost", "c", *flags])
    out, err = capsys.readouterr()
    assert out == ""
    assert {word for word in ("debug", "info") if f"detail {word}" in err} == shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        frame.main([name, "--help"])
    help_text = capsys.readouterr().out
    assert f"sgl-eagle {name} " in help_text.partition("usage:")[2].partition("\n")[2]
    assert "--format" in help_text
    assert read_help(name) == load_command(name).HELP
    assert "\n" not in read_help(name)


WITHOUT_TORCH = (
    "import sys\n"
    "from sgl_eagle.cli import main\n"
    "class NoTorch:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if name.partition('.')[0] in {'torch', 'transformers'}:\n"
    "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
    "sys.meta_path.insert(0, NoTorch())\n"
    "sys.exit(main(sys.argv[1:]))\n"
)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_avoids_torch(name):
    done = run_process("-c", WITHOUT_TORCH, name, "--help")
    assert (done.returncode, done.stderr) == (0, "")


def test_help_is_quick_since_it_imports_nothing_but_the_frame():
    code = (
        "import sys\nbefore = set(sys.modules)\nfrom sgl_eagle.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "print(*sorted(set(sys.modules) - before), file=sys.stderr)"
    )
    done = run_process("-c", code)
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    imported = [
        name
        for name in done.stderr.split()
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not name.startswith("sgl_eagle.cli.frame.")
    ]
    assert imported == [
        *("sgl_eagle", "sgl_eagle.cli", "sgl_eagle.cli.frame"),
        *("sgl_eagle_harness", "sgl_eagle_harness.errors"),
    ]


def test_module_entry_point_passes_the_exit_code_on():
    done = run_process("-m", "sgl_eagle.cli", "no-such-command")
    assert done.returncode == 2
    assert "there is no command 'no-such-command'" in done.stderr


PRINTING = (
    "import sys, types\n"
    "from sgl_eagle.cli.frame import main as frame\n"
    "from sgl_eagle.cli.frame.output import write_result\n"
    "probe = types.ModuleType('probe')\n"
    "probe.HELP = ''\n"
    "probe.add_arguments = lambda parser: None\n"
    "probe.run = lambda args: write_result([], text='x' * 10**6, output_format='text') or 0\n"
    "sys.modules['sgl_eagle.cli.probe'] = probe\n"
    "frame.COMMANDS = ('probe',)\n"
    "sys.exit(frame.main(['probe']))\n"
)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_at_stdout_is_one_line():
    with Path("/dev/full").open("w") as full:
        done = run_process("-c", PRINTING, stdout=full)
    assert done.returncode == 1
    assert done.stderr == (
        "sgl-eagle probe: error: the result cannot be written to stdout: No space left on device\n"
    )


def test_reader_that_left_is_no_traceback():
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = run_process("-c", PRINTING, stdout=write_end)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("closed", "arguments", "ending"),
    [
        (">&-", ["-c", PRINTING], (0, "", "")),
        ("<&-", ["-c", PRINTING], (0, "x" * 10**6 + "\n", "")),
        ("2>&-", ["-m", "sgl_eagle.cli", "tunes"], (2, "", "")),
        (">&- 2>&-", ["-m", "sgl_eagle.cli", "tunes"], (2, "", "")),
    ],
    ids=["stdout", "stdin", "stderr", "both"],
)
def test_streams_that_a_shell_has_closed(closed, arguments, ending):
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr) == ending


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_version_on_a_full_disk_is_no_traceback():
    with Path("/dev/full").open("w") as full:
        assert (
            "Traceback" not in run_process("-m", "sgl_eagle.cli", "--version", stdout=full).stderr
        )


def test_json_result_is_plain(capsys):
    from dataclasses import dataclass

    import numpy as np
    from pydantic import BaseModel

    class Model(BaseModel):
        seconds: float | None

    @dataclass
    class Row:
        path: Path
        counts: np.ndarray

    row = Row(path=Path("a/b"), counts=np.array([1, 2]))
    result = {"row": row, "model": Model(seconds=None), "n": np.int64(3)}
    write_result(result, text="", output_format="json")
    assert json.loads(capsys.readouterr().out) == {
        "row": {"path": "a/b", "counts": [1, 2]},
        "model": {"seconds": None},
        "n": 3,
    }


def test_json_result_refuses_what_json_cannot_say():
    with pytest.raises(ValueError, match="Out of range float"):
        write_result({"x": float("nan")}, text="", output_format="json")
    with pytest.raises(TypeError, match="object has no JSON form"):
        write_result(object(), text="", output_format="json")


def test_table_aligns_numbers_at_the_right():
    table = render_table(["policy", "tok/s"], [["plain", "9.1"], ["eagle2", "not measured"]])
    assert table.splitlines() == [
        "policy         tok/s",
        "------  ------------",
        "plain            9.1",
        "eagle2  not measured",
    ]


def test_table_without_rows_is_a_header():
    assert render_table(["a"], []).splitlines() == ["a", "-"]


def test_progress_logs_two_lines_without_a_terminal(capsys):
    assert list(progress(range(3), description="record chat", unit="prompts")) == [0, 1, 2]
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("record chat ...\nrecord chat: 3 prompts in ")


def test_progress_shows_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(progress(iter("ab"), description="tune", total=2)) == ["a", "b"]
    assert "100%" in capsys.readouterr().err


def test_quiet_progress_is_silent(capsys):
    assert list(progress([1], description="tune", quiet=True)) == [1]
    assert capsys.readouterr().err == ""


def test_writable_paths_pass_and_nothing_is_created(tmp_path):
    require_writable(tmp_path / "new" / "deep" / "cost.json", "--out")
    require_writable_folder(tmp_path / "run", "--out")
    assert list(tmp_path.iterdir()) == []


def test_unwritable_paths_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=f"--out must name a file, but {tmp_path} is a folder"):
        require_writable(tmp_path, "--out")
    with pytest.raises(
        OutputError, match=r"--out .*file/x\.json cannot be written: .*not a folder"
    ):
        require_writable(tmp_path / "file" / "x.json", "--out")
    with pytest.raises(OutputError, match=r"--out .*file cannot be written: .* is not a folder"):
        require_writable_folder(tmp_path / "file", "--out")


def test_devices_and_pipes_are_never_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match=r"--out must name a file, but .*pipe is a device or a p"):
        require_writable(tmp_path / "pipe", "--out")


def test_paths_that_exist_only_in_part_are_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nothing" / "here")
    with pytest.raises(OutputError, match=r"--out .*link cannot be written: .* is not a folder"):
        require_writable_folder(tmp_path / "link", "--out")
    with pytest.raises(OutputError, match=r"--out .*xx cannot be written: .*name too long"):
        require_writable(tmp_path / ("x" * 300), "--out")


def test_outputs_that_are_inputs_are_refused(tmp_path):
    traces = tmp_path / "traces"
    traces.mkdir()
    shard = traces / "chat.parquet"
    shard.write_text("")
    (tmp_path / "link").symlink_to(shard)
    require_not_read(traces / "new.json", "--out", "TRACES", [traces, tmp_path / "missing"])
    for out in (shard, tmp_path / "link"):
        with pytest.raises(OutputError, match=r"--out .* would replace what TRACES names"):
            require_not_read(out, "--out", "TRACES", [traces])
    with pytest.raises(OutputError, match="would replace what --out names"):
        require_not_read(tmp_path / "a", "--result", "--out", [tmp_path / "a"])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write")
def test_a_link_into_a_folder_that_refuses_files_is_refused(tmp_path):
    (tmp_path / "link.json").symlink_to("/proc/x.json")
    with pytest.raises(OutputError, match=r"--out .*link\.json cannot be written: /proc: "):
        require_writable(tmp_path / "link.json", "--out")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write")
def test_folder_that_refuses_files_is_refused():
    with pytest.raises(OutputError, match=r"--out /proc/x\.json cannot be written: /proc: "):
        require_writable(Path("/proc/x.json"), "--out")


def test_no_place_for_temporary_files_is_refused(monkeypatch):
    require_temporary_folder()

    def find_none():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", find_none)
    with pytest.raises(OutputError, match=r"found in \['/tmp'\]; set TMPDIR to a folder that can"):
        require_temporary_folder()


def test_integer_arguments():
    assert (positive_int("3"), non_negative_int("0")) == (3, 0)
    with pytest.raises(argparse.ArgumentTypeError, match="whole number of at least 1, got '0'"):
        positive_int("0")
    assert seed_number("4294967295") == 2**32 - 1
    with pytest.raises(argparse.ArgumentTypeError, match=r"in \[0, 4294967295\], got '4294967296'"):
        seed_number("4294967296")
    with pytest.raises(argparse.ArgumentTypeError, match=r"whole number of at least 0, got '1\.5'"):
        non_negative_int("1.5")


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("num_trials must be at least 1, got 0", "--trials must be at least 1, got 0"),
        ("seed and num_trials must be set", "--seed and --trials must be set"),
        ("rows must be fewer for num_trials=3", "rows must be fewer for --trials=3"),
        ("seed must go with num_trials=3", "--seed must go with --trials=3"),
    ],
    ids=str,
)
def test_refused_fields_are_named_as_flags(message, named):
    flags = {"num_trials": "--trials", "seed": "--seed"}
    with pytest.raises(UsageError, match=f"^{named}$"), naming_flags(**flags):
        raise TraceError(message)


def test_messages_that_name_the_flag_keep_it():
    with pytest.raises(UsageError, match=r"^--seed must be small$"), naming_flags(seed="--seed"):
        raise UsageError("--seed must be small")


def test_errors_about_other_things_stay_as_they_are():
    error = TraceError("t.parquet: max_num_trials must be 3, row num_trials")
    with pytest.raises(TraceError) as raised, naming_flags(num_trials="--trials"):
        raise error
    assert raised.value is error
