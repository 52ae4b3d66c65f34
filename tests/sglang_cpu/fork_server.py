"""Runs servers and model code as forks of one process that has imported SGLang.

The import takes a server's three processes most of their start, and nearly every test wants a
server of its own. Run as a script: a line of JSON on stdin asks, a line on stdout answers.

    {"serve": [FLAG, ...], "variables": {...}, "log": FILE,
     "fault": FUNCTION of faults or MODULE.FUNCTION, or null}     {"pid": PID}
    {"poll": PID}                                                 {"exit_code": CODE or null}
    {"call": [MODULE, FUNCTION, ARGUMENT, ...], "answer": FILE}   {"exit_code": CODE}

A server leads its own process group. A call is waited for; what the function returns is in its
file, as JSON. The fork server ends when stdin does, and its servers with it.
"""

import importlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

PRELOADED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_loader",
    "sglang.srt.models.llama",
    "sglang.srt.models.llama_eagle3",
    "sglang.srt.models.registry",
    "sglang.srt.speculative.eagle_worker_v2",
)
"""What every server imports. The plugin is not here: SGLang itself must find it."""


def preload():
    for name in PRELOADED:
        importlib.import_module(name)
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    assert num_threads == 1, "a fork would lack the other threads"
    # The children of a server are forks too, whatever SGLang asks for.
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_method, **_force: None


def fork(run):
    pid = os.fork()
    if pid:
        return pid
    try:
        run()
        os._exit(0)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:  # noqa: BLE001  nothing of a fork may return into the fork server
        traceback.print_exc()
        os._exit(1)


def serve(request):
    os.setsid()
    output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["variables"])
    if request["fault"]:
        module, _, function = request["fault"].rpartition(".")
        getattr(importlib.import_module(module or "faults"), function)()
    sys.argv = ["launch_server.py", *request["serve"]]
    del sys.modules["sglang.launch_server"]  # runpy warns of a module that runs twice
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def call(request):
    module, function, *arguments = request["call"]
    answer = getattr(importlib.import_module(module), function)(*arguments)
    Path(request["answer"]).write_text(json.dumps(answer), encoding="utf-8")


def poll(pid, codes):
    if codes[pid] is None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            codes[pid] = os.waitstatus_to_exitcode(status)
    return {"exit_code": codes[pid]}


def answer(request, codes):
    if "poll" in request:
        return poll(request["poll"], codes)
    if "serve" in request:
        pid = fork(lambda: serve(request))
        codes[pid] = None
        return {"pid": pid}
    pid = fork(lambda: call(request))
    return {"exit_code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what imports print must not look like an answer
    preload()
    codes = {}
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line), codes)) + "\n")
    for pid in codes:
        if poll(pid, codes)["exit_code"] is None:
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)  # to take down what was imported would take seconds


if __name__ == "__main__":
    main()
