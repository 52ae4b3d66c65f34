"""`sgl-eagle record --engine` against a server that only listens."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sgl_eagle.cli import main
from sgl_eagle.plugin.drive_server import DriveConfig, ServerError, drive_server
from sgl_eagle.reference.prompts import load_shipped_prompts


class Listener(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"data": [{"id": "tiny"}]} if self.server.is_engine else {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if body["custom_params"]["sgl_eagle"]["prompt_id"] == self.server.refused:
            self.answer({"error": "too long"}, status=400)
        else:
            self.answer({"usage": {"completion_tokens": 7}})

    def answer(self, content, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    listening = ThreadingHTTPServer(("127.0.0.1", 0), Listener)
    listening.bodies, listening.refused, listening.is_engine = [], None, True
    listening.url = f"http://127.0.0.1:{listening.server_address[1]}"
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    yield listening
    listening.shutdown()
    thread.join()
    listening.server_close()


def drive(server, **changes):
    prompts = load_shipped_prompts(("code", "qa"), "tune")[:30]
    answered = []
    config = DriveConfig(**{"url": server.url, "concurrency": 4, "max_new_tokens": 9} | changes)
    return drive_server(prompts, config, on_prompt=lambda: answered.append(1)), prompts, answered


def test_every_prompt_is_asked_once_with_its_label(server):
    summary, prompts, answered = drive(server, temperature=0.5, top_k=3)
    assert (summary.model, summary.num_prompts, summary.num_tokens) == ("tiny", 30, 210)
    assert len(answered) == 30
    labels = {
        body["custom_params"]["sgl_eagle"]["prompt_id"]: (
            body["custom_params"]["sgl_eagle"]["workload"],
            body["messages"][0]["content"],
        )
        for body in server.bodies
    }
    assert labels == {prompt.id: (prompt.workload, prompt.turns[0]) for prompt in prompts}
    first = server.bodies[0]
    assert (first["max_tokens"], first["temperature"], first["top_k"]) == (9, 0.5, 3)


def test_a_refused_prompt_is_named_and_ends_the_run(server):
    server.refused = load_shipped_prompts(("code",), "tune")[2].id
    with pytest.raises(ServerError, match=f"refused prompt '{server.refused}' with 400: .*too"):
        drive(server, concurrency=1)
    assert len(server.bodies) < 30


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:1", "--engine must be the URL of a server, http://HOST:PORT"),
        ("http://127.0.0.1:1", "cannot reach http://127.0.0.1:1/v1/models"),
    ],
)
def test_a_server_that_is_not_there_is_named(url, message, server):
    with pytest.raises(ServerError, match=message):
        drive(server, url=url)


def test_something_else_that_listens_is_no_engine(server):
    server.is_engine = False
    with pytest.raises(ServerError, match="names no model, so it is no SGLang server"):
        drive(server)


def test_the_command_says_what_was_answered(server, capsys):
    options = ["--limit", "2", "--rows", "2", "--quiet", "--format", "json"]
    assert main(["record", "--engine", f"{server.url}/", *options]) == 0
    assert json.loads(capsys.readouterr().out)["num_prompts"] == 10


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--out", "traces"], "--out must be left out with --engine"),
        (["--beams", "2"], "--beams must be left out with --engine"),
        (["--dtype", "float32"], "--dtype must be left out with --engine"),
    ],
)
def test_what_the_server_settles_is_refused(option, message, server, capsys):
    assert main(["record", "--engine", server.url, *option]) == 2
    assert message in capsys.readouterr().err
    assert server.bodies == []


def test_without_an_engine_a_folder_is_needed(capsys):
    assert main(["record"]) == 2
    assert "--out must name a folder for shards" in capsys.readouterr().err
