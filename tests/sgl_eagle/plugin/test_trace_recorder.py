"""Traces from a server: bounded on its side, whole files on the other, whatever ends it."""

import io
import logging
import os
import pickle
import subprocess
import sys

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
from sgl_eagle.plugin.trace_pipe import TracePipe
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
        self.observer.completed(len(requests))
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
