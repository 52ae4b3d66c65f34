"""Traces from a server: bounded on its side, whole files on the other, whatever ends it."""

import io
import logging
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from fake_requests import FakeRequest, make_result, make_sampling, two_level_trees
from fake_server import SETUP

from sgl_eagle.plugin.observer import StepObserver
from sgl_eagle.plugin.request_label import read_label
from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle.plugin.startup import trace_header
from sgl_eagle.plugin.trace_files import IDLE_S, SECONDS_PER_SHARD, TraceFiles
from sgl_eagle.plugin.trace_frames import frame, read_message
from sgl_eagle.plugin.trace_pipe import TracePipe, _write_parts
from sgl_eagle.plugin.trace_recorder import TraceRecorder
from sgl_eagle_harness.errors import OutputError
from sgl_eagle_harness.ordinary_trace import read_ordinary_trace
from sgl_eagle_harness.trace_store import read_dense_trace
from sgl_eagle_harness.types import TreeLimits

LIMITS = TreeLimits(num_steps=2, topk=2, num_draft_tokens=4)
LABEL = {"sgl_eagle": {"workload": "code", "prompt_id": "p1"}}


def make_header(tmp_path, *, dense):
    target = SETUP.target.model_copy(update={"dims": {"vocab_size": 100}})
    setup = SETUP.model_copy(update={"target": target})
    header = trace_header(setup, LIMITS, tmp_path / "no draft", dense=dense)
    assert header.censored is not dense
    return header


@pytest.fixture(autouse=True)
def _no_sglang(monkeypatch):
    monkeypatch.setattr("sgl_eagle.plugin.startup.version", lambda name: f"version of {name}")


class Files:
    """A recording without the process between."""

    def __init__(self, folder, *, dense=False, room=10**9):
        self.seconds = 0.0
        self.messages = []
        self.room = room
        header = make_header(folder, dense=dense)
        self.files = TraceFiles(folder, header, stem="trace", now=lambda: self.seconds)
        self.recorder = TraceRecorder(self.send, dense=dense)
        self.observer = StepObserver(
            clock=RoundClock(),
            runs_ahead=False,
            listeners=(self.recorder,),
            gauges=lambda _: {},
            export=lambda _: None,
        )

    def send(self, message):
        if len(self.messages) >= self.room:
            return False
        self.messages.append(message)
        self.files.take(read_message(io.BytesIO(b"".join(frame(message)))))
        return True

    def step(self, requests, emitted, drafted=None):
        if drafted is not None:
            self.observer.drafted(drafted)
        self.observer.launched(requests, make_result(emitted))
        self.observer.completed([len(row) - 1 for row in emitted])
        for request, tokens in zip(requests, emitted, strict=True):
            request.output_ids += tokens


def labelled(rid, **label):
    params = {"sgl_eagle": label} if label else None
    return FakeRequest(rid, sampling_params=make_sampling(custom_params=params))


def test_an_ordinary_trace_holds_what_was_verified(tmp_path):
    files = Files(tmp_path)
    request = labelled("r1", workload="code", prompt_id="p1")
    files.step([request], [[10, 20, 5]], two_level_trees(1, verified=3))
    files.step([request], [[6]])
    files.observer.finished("r1")
    files.files.close()
    header, (first, second) = read_ordinary_trace(tmp_path)
    assert (first.prompt_id, first.workload, first.position, first.context_len) == (
        *("p1", "code"),
        *(1, 3),
    )
    assert first.tokens.tolist() == [50, 10, 11, 20]
    assert first.parents.tolist() == [-1, 0, 0, 1]
    assert first.path_log_confidence == pytest.approx(np.log([1, 0.6, 0.3, 0.36]), abs=1e-5)
    assert first.accepted.tolist() == [1, 3]
    assert first.bonus_token == 5
    assert second.tokens.tolist() == [5]
    assert (second.position, second.context_len, second.bonus_token) == (4, 6, 6)
    assert header.sampling.temperature == 0
    assert header.engine == "sglang"


def test_a_dense_trace_holds_whole_trees_and_its_first_root_came_from_prefill(tmp_path):
    files = Files(tmp_path, dense=True)
    request = labelled("r1", workload="qa")
    for token in (10, 20, 7):
        files.step([request], [[token]], two_level_trees(1, verified=0))
    files.observer.finished("r1")
    files.files.close()
    trace = read_dense_trace(tmp_path)
    assert trace.prompt_ids == ["r1"]
    assert trace.prompt_workloads == ["qa"]
    assert trace.next_token.tolist() == [10, 20, 7]
    assert trace.context_len.tolist() == [3, 4, 5]
    assert trace.tokens.tolist() == [[10, 11, 20, 21, 30, 31]] * 3
    assert trace.parents[0].tolist() == [-1, -1, 0, 0, 1, 1]
    assert trace.on_path[0].tolist() == [True, False, True, False, False, False]


def test_a_gap_ends_the_dense_trace_of_a_request(tmp_path, caplog):
    files = Files(tmp_path, dense=True)
    request = labelled("r1")
    files.step([request], [[10]], two_level_trees(1, verified=0))
    request.output_ids.append(99)  # as after a retraction, whose prefill emits a token
    files.step([request], [[20]], two_level_trees(1, verified=0))
    files.observer.finished("r1")
    with caplog.at_level(logging.WARNING):
        files.files.close()
    assert read_dense_trace(tmp_path).num_positions == 1
    assert "keeps 1 of 2 positions of r1: a tree is missing" in caplog.text


def test_the_same_prompt_twice_has_two_names_in_a_dense_trace(tmp_path):
    files = Files(tmp_path, dense=True)
    for rid in ("r1", "r2"):
        request = labelled(rid, prompt_id="p")
        files.step([request], [[10]], two_level_trees(1, verified=0))
        files.observer.finished(rid)
    files.files.close()
    assert read_dense_trace(tmp_path).prompt_ids == ["p", "p~r2"]


def test_sampling_prompts_and_forced_text_are_kept_apart(tmp_path):
    files = Files(tmp_path)
    greedy, forced = labelled("greedy"), labelled("forced")
    forced.eos_token_ids = {6}
    warm = labelled("warm", prompts="random_tokens")
    warm.sampling_params.top_k = 1 << 30
    warm.sampling_params.temperature = 0.7
    for request in (greedy, forced, warm):
        files.step([request], [[6]])
        files.step([request], [[7]])
        files.observer.finished(request.rid)
    files.files.close()
    headers = {}
    for path in tmp_path.glob("*.parquet"):
        header, steps = read_ordinary_trace(path)
        headers[steps[0].prompt_id] = header
    assert headers["warm"].sampling.temperature == 0.7
    assert headers["warm"].sampling.top_k == 0
    assert headers["warm"].prompts.kind == "random_tokens"
    assert headers["forced"].forced_continuation
    assert not headers["greedy"].forced_continuation


def test_shards_close_with_age_and_only_finished_requests_go_in(tmp_path):
    files = Files(tmp_path)
    done, running = labelled("done"), labelled("running")
    files.step([done, running], [[5], [5]])
    files.observer.finished("done")
    files.files.rotate()
    assert list(tmp_path.iterdir()) == []
    for second in range(1, int(SECONDS_PER_SHARD)):
        files.seconds = float(second)
        files.step([running], [[5]])
        files.files.rotate()
    assert list(tmp_path.iterdir()) == []
    files.seconds = SECONDS_PER_SHARD
    files.files.rotate()
    assert {step.prompt_id for step in read_ordinary_trace(tmp_path)[1]} == {"done"}
    files.files.close()
    assert {step.prompt_id for step in read_ordinary_trace(tmp_path)[1]} == {"done", "running"}
    assert files.files.num_shards == 2


def test_an_idle_server_closes_its_shards_early(tmp_path):
    files = Files(tmp_path)
    files.step([labelled("done")], [[5]])
    files.observer.finished("done")
    files.seconds = IDLE_S
    files.files.rotate()
    assert files.files.num_shards == 1


def test_a_full_queue_loses_steps_and_says_how_many(tmp_path):
    files = Files(tmp_path, room=2)
    request = labelled("r1")
    for _ in range(4):
        files.step([request], [[5]])
    assert files.recorder.dropped_ct == 3
    assert len(files.messages) == 2


@pytest.mark.parametrize(
    "change",
    [{"logit_bias": {"7": 1.0}}, {"min_p": 0.1}, {"repetition_penalty": 1.1}],
    ids=lambda change: next(iter(change)),
)
def test_text_that_something_else_decides_is_not_in_a_dense_trace(change, tmp_path):
    files = Files(tmp_path, dense=True)
    request = FakeRequest("r1", sampling_params=make_sampling(**change))
    files.step([request], [[10]], two_level_trees(1, verified=0))
    assert files.messages == []
    assert files.recorder.num_left_out == 1


def test_a_bad_label_is_named_and_the_request_recorded(tmp_path, caplog):
    assert read_label({}).workload == "unlabelled"
    assert read_label(LABEL).prompt_id == "p1"
    files = Files(tmp_path)
    request = labelled("r1", workload="code", colour="red")
    with caplog.at_level(logging.WARNING):
        files.step([request], [[5]])
    assert "custom_params.sgl_eagle: colour: Extra inputs are not permitted" in caplog.text
    files.observer.finished("r1")
    files.files.close()
    assert read_ordinary_trace(tmp_path)[1][0].workload == "unlabelled"


def test_the_writing_process_outlives_a_server_that_is_killed(tmp_path):
    code = (
        "import os, pickle, signal, sys, time\n"
        "from pathlib import Path\n"
        "from sgl_eagle.plugin.trace_pipe import TracePipe\n"
        "from sgl_eagle_harness.trace_schema import TraceHeader\n"
        "header, messages = pickle.load(sys.stdin.buffer)\n"
        "pipe = TracePipe(Path(sys.argv[1]), TraceHeader.model_validate_json(header))\n"
        "for message in messages: assert pipe.send(message)\n"
        "while pipe.waiting_bytes: time.sleep(0.001)\n"
        "print(pipe._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    files = Files(tmp_path / "unused")
    request = labelled("r1")
    for token in (5, 6):
        files.step([request], [[token]])
    header = make_header(tmp_path, dense=False).model_dump_json()
    folder = tmp_path / "traces"
    killed = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        input=pickle.dumps((header, files.messages)),
        stdout=subprocess.PIPE,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    # The writer holds the same stdout, so that its end means that the writer has ended, too.
    assert killed.returncode == -9
    header, steps = read_ordinary_trace(folder)
    assert [step.bonus_token for step in steps] == [5, 6]
    assert [path.suffix for path in folder.iterdir()] == [".parquet"]


def test_a_closed_pipe_has_written_everything(tmp_path):
    files = Files(tmp_path / "unused")
    files.step([labelled("r1")], [[5]])
    pipe = TracePipe(tmp_path / "traces", make_header(tmp_path, dense=False))
    assert all(pipe.send(message) for message in files.messages)
    pipe.close()
    assert len(read_ordinary_trace(tmp_path / "traces")[1]) == 1


def test_a_folder_with_a_dense_recording_is_refused(tmp_path):
    (tmp_path / "old.parquet").write_text("")
    with pytest.raises(OutputError, match="holds a recording already"):
        TracePipe(tmp_path, make_header(tmp_path, dense=True))
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot make the folder"):
        TracePipe(tmp_path / "file" / "below", make_header(tmp_path, dense=False))


def test_messages_after_the_writing_process_has_died_are_lost_and_said_to_be(tmp_path, caplog):
    files = Files(tmp_path / "unused")
    files.step([labelled("r1")], [[5]])
    pipe = TracePipe(tmp_path / "traces", make_header(tmp_path, dense=False))
    pipe._process.kill()
    pipe._process.wait()
    with caplog.at_level(logging.WARNING):
        assert pipe.send(files.messages[0])
        pipe._thread.join(10)
    assert not pipe.send(files.messages[1])
    assert "SGL_EAGLE records no more: its writing process ended with code -9" in caplog.text


def test_a_queue_takes_a_bounded_amount_of_memory(tmp_path, monkeypatch):
    files = Files(tmp_path / "unused")
    files.step([labelled("r1")], [[10]], two_level_trees(1))
    start, step = files.messages
    monkeypatch.setattr("sgl_eagle.plugin.trace_pipe.SECONDS_PER_WRITE", 60.0)
    monkeypatch.setattr("sgl_eagle.plugin.trace_pipe.MAX_WAITING_BYTES", 10 * step.num_bytes)
    pipe = TracePipe(tmp_path / "traces", make_header(tmp_path, dense=False))
    assert [pipe.send(step) for _ in range(12)] == [True] * 10 + [False] * 2
    assert not pipe.send(start)
    pipe.close()
    assert pipe.waiting_bytes == 0


def test_a_large_step_passes_the_pipe_whole(tmp_path):
    num_rows = 2000  # a few times what a pipe holds
    files = Files(tmp_path / "unused")
    requests = [labelled(f"r{row}") for row in range(num_rows)]
    files.step(requests, [[10, 20, 5]] * num_rows, two_level_trees(num_rows))
    pipe = TracePipe(tmp_path / "traces", make_header(tmp_path, dense=False))
    assert all(pipe.send(message) for message in files.messages)
    pipe.close()
    steps = read_ordinary_trace(tmp_path / "traces")[1]
    assert len(steps) == num_rows
    assert all(step.accepted.tolist() == [1, 3] for step in steps)


def test_a_write_that_ends_early_goes_on(monkeypatch):
    read_end, write_end = os.pipe()
    monkeypatch.setattr("sgl_eagle.plugin.trace_pipe.os.writev", lambda *_: 0)
    with os.fdopen(read_end, "rb") as reader:
        _write_parts(write_end, [memoryview(b"abc"), memoryview(np.arange(3))])
        os.close(write_end)
        assert reader.read() == b"abc" + np.arange(3).tobytes()


def test_a_frame_that_is_cut_off_is_the_end(tmp_path):
    files = Files(tmp_path)
    files.step([labelled("r1")], [[10]], two_level_trees(1))
    whole = b"".join(frame(files.messages[1]))
    assert read_message(io.BytesIO(whole)) is not None
    for length in (0, 3, len(whole) - 1):
        assert read_message(io.BytesIO(whole[:length])) is None


@pytest.mark.parametrize("dense", [False, True], ids=["ordinary", "dense"])
def test_what_arrives_is_what_each_request_was_before_its_step(dense, tmp_path):
    server = RandomServer(tmp_path, dense=dense)
    for _ in range(300):
        server.step()
    arrived = {run.started.rid: run.steps for run in server.files.files._running.values()}
    assert len(arrived) > 3
    assert sum(map(len, arrived.values())) > 100
    for rid, steps in arrived.items():
        assert [as_tuple(step) for step in steps] == server.expected[rid]


class RandomServer:
    """Requests join, end and are retracted, and steps are lost, at random.

    `expected` is what each request was before each of its steps, read one by one.
    """

    def __init__(self, folder, *, dense):
        self.files, self.dense = Files(folder, dense=dense), dense
        self.choose = np.random.default_rng(7)
        self.running, self.expected = [], {}
        self.num_started = 0

    def step(self):
        if self.choose.random() < 0.3 or not self.running:
            self.running.append(labelled(f"r{self.num_started}"))
            self.num_started += 1
        for request in self.running:
            self.end_or_retract(request)
        count = len(self.running)
        drafted = self.draft(count) if self.dense or self.choose.random() < 0.8 else None
        emitted = [self.emit() for _ in range(count)]
        self.files.room = 0 if self.choose.random() < 0.1 else 10**9
        for row, request in enumerate(self.running):
            if not (request.over or request.is_retracted):
                self.expect(request, emitted[row], drafted, row)
        self.files.step(self.running, emitted, drafted)
        self.running = [request for request in self.running if not request.over]
        for request in filter(lambda request: request.is_retracted, self.running):
            request.is_retracted = False
            request.output_ids.append(99)  # by its next prefill

    def end_or_retract(self, request):
        chance = self.choose.random()
        request.over = chance < 0.03
        request.is_retracted = chance > 0.97
        if request.over:
            self.files.observer.finished(request.rid)

    def emit(self):
        return self.choose.integers(0, 90, 1 if self.dense else self.choose.integers(1, 4)).tolist()

    def draft(self, num_rows):
        """The usual trees; of each another part that holds its nodes' parents is verified."""
        parts = np.array([[-1] * 4, [0, 2, -1, -1], [1, 4, 5, -1], [0, 1, 3, 4]])
        columns = parts[self.choose.integers(0, len(parts), num_rows)]
        return replace(two_level_trees(num_rows), columns=columns)

    def expect(self, request, emitted, drafted, row):
        kept = self.files.room > 0
        steps = self.expected.setdefault(request.rid, [] if kept else None)
        if steps is not None and kept:
            num_tokens = len(request.output_ids)
            context_len = len(request.origin_input_ids) + num_tokens - 1
            nodes = self.nodes(drafted, row)
            steps.append((num_tokens, context_len, request.output_ids[-1], emitted, nodes))

    def nodes(self, drafted, row):
        if drafted is None:
            return []
        trees, columns = drafted.trees, drafted.columns[row]
        logs = trees.step_log_probs if self.dense else trees.path_log_confidence
        columns = list(range(6)) if self.dense else columns[columns >= 0].tolist()
        place = {-1: -1} | {column: index for index, column in enumerate(columns)}
        return [
            (trees.tokens[row, c], place[int(trees.parents[row, c])], trees.depths[c], logs[row, c])
            for c in columns
        ]


def as_tuple(step):
    nodes = zip(step.tokens, step.parents, step.depths, step.log_probs, strict=True)
    return (
        *(step.position, step.context_len, step.root_token),
        *(step.emitted.tolist(), list(nodes)),
    )
