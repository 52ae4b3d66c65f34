"""Reports to render, and a Chromium page driven over DevTools' pipe, without any driver package."""

import contextlib
import fcntl
import json
import os
import runpy
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_eagle_tuner.report.data import DemoReport
from sgl_eagle_tuner.report.render import render_report

TIMEOUT_S = 300.0
"""Ends only what hangs: the first start reads some hundred MB."""
MAKER = Path(__file__).parents[2] / "data" / "make_demo_report.py"

# A page load must not touch the network, the browser's own services included.
CHROMIUM_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


@pytest.fixture(scope="session")
def maker() -> dict[str, Any]:
    return runpy.run_path(str(MAKER))


@pytest.fixture(scope="session")
def full_report(maker: dict[str, Any]) -> DemoReport:
    return maker["make_report"]()


@pytest.fixture(scope="session")
def bare_report(maker: dict[str, Any]) -> DemoReport:
    return maker["make_bare_report"]()


@pytest.fixture(scope="session")
def full_html(full_report: DemoReport) -> str:
    return render_report(full_report)


@pytest.fixture(scope="session")
def bare_html(bare_report: DemoReport) -> str:
    return render_report(bare_report)


class BrowserPage:
    """One tab. `events` holds every DevTools event since the tab was opened."""

    def __init__(self, pid: int, write_fd: int, read_fd: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._pid = pid
        self._write_fd = write_fd
        self._read_fd = read_fd
        self._buffer = b""
        self._session: str | None = None
        self._last_id = 0
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Page.setLifecycleEventsEnabled", enabled=True)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            seconds = max(deadline - time.monotonic(), 0)
            readable, _, _ = select.select([self._read_fd], [], [], seconds)
            assert readable, "Chromium does not answer"
            chunk = os.read(self._read_fd, 1 << 20)
            assert chunk, "Chromium has ended"
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        if "id" not in message:
            self.events.append(message)
        return message

    def open(self, path: Path, *, width: int = 1280, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.events.clear()
        loader = self.send("Page.navigate", url=path.as_uri())["loaderId"]
        # The load of the page before may still be reported, too.
        while not any(
            (event["loaderId"], event["name"]) == (loader, "load")
            for event in self.named("Page.lifecycleEvent")
        ):
            self._receive()

    def named(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event["method"] == method]

    def evaluate(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self) -> list[dict[str, Any]]:
        return [
            *self.named("Runtime.consoleAPICalled"),
            *self.named("Runtime.exceptionThrown"),
            *self.named("Log.entryAdded"),
        ]

    def requested_urls(self) -> list[str]:
        return [event["request"]["url"] for event in self.named("Network.requestWillBeSent")]

    def close(self) -> None:
        self._session = None
        with contextlib.suppress(AssertionError, OSError):
            self.send("Browser.close")
        for fd in (self._write_fd, self._read_fd):
            os.close(fd)
        deadline = time.monotonic() + 10
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(0.05)


def _high_fd(fd: int) -> int:
    # Out of the way of descriptors 3 and 4, which Chromium expects.
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return moved


@pytest.fixture(scope="module")
def browser_page(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserPage]:
    profile = tmp_path_factory.mktemp("chromium")
    to_read, to_write = (_high_fd(fd) for fd in os.pipe())
    from_read, from_write = (_high_fd(fd) for fd in os.pipe())
    log = os.open(profile / "stderr.txt", os.O_WRONLY | os.O_CREAT, 0o600)
    pid = os.posix_spawn(
        chromium,
        [chromium, *CHROMIUM_FLAGS, f"--user-data-dir={profile / 'profile'}", "about:blank"],
        os.environ | {"HOME": str(profile)},
        file_actions=[
            (os.POSIX_SPAWN_DUP2, to_read, 3),
            (os.POSIX_SPAWN_DUP2, from_write, 4),
            (os.POSIX_SPAWN_DUP2, log, 2),
        ],
    )
    for fd in (to_read, from_write, log):
        os.close(fd)
    page = BrowserPage(pid, to_write, from_read)
    yield page
    page.close()
    shutil.rmtree(profile, ignore_errors=True)
