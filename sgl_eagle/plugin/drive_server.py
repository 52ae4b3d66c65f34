"""Sends prompts to a running server, labelled for its traces; speaks HTTP and nothing else."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from sgl_eagle.plugin.request_label import LABEL_KEY
from sgl_eagle.reference.prompts import Prompt
from sgl_eagle_harness.errors import SglEagleError

REQUEST_TIMEOUT_S = 600
MAX_ERROR_TEXT = 300


class ServerError(SglEagleError, RuntimeError):
    """A server that cannot be reached, or that refuses a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveConfig:
    """How to ask.

    Attributes:
        url: Root of the server, e.g. "http://127.0.0.1:30000".
        concurrency: Requests at a time.
        max_new_tokens: Completion length at most.
        temperature: 0 is greedy.
        top_p: Nucleus mass.
        top_k: Tokens kept; 0 keeps all.
    """

    url: str
    concurrency: int
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveSummary:
    """What the server answered.

    Attributes:
        model: Name of the served model.
        num_prompts: Prompts answered.
        num_tokens: Completion tokens of all of them.
        seconds: From the first request to the last answer.
    """

    model: str
    num_prompts: int
    num_tokens: int
    seconds: float


def drive_server(
    prompts: Sequence[Prompt], config: DriveConfig, *, on_prompt: Callable[[], None]
) -> DriveSummary:
    """Have every prompt's first turn answered.

    Args:
        prompts: At least one.
        config: How to ask.
        on_prompt: Called after every answer.

    Returns:
        Counts.

    Raises:
        ServerError: If the server cannot be reached or refuses a request; names the prompt. No
            further request is sent then.
    """
    model = _served_model(config.url)
    started = time.perf_counter()
    num_tokens = 0
    with ThreadPoolExecutor(config.concurrency) as pool:
        try:
            answers = [pool.submit(_complete, prompt, model, config) for prompt in prompts]
            for answer in as_completed(answers):
                num_tokens += answer.result()
                on_prompt()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return DriveSummary(
        model=model,
        num_prompts=len(prompts),
        num_tokens=num_tokens,
        seconds=time.perf_counter() - started,
    )


def _served_model(url: str) -> str:
    answer = _request(f"{url}/v1/models", None, "the server's models")
    try:
        return str(answer["data"][0]["id"])
    except (LookupError, TypeError):
        raise ServerError(f"{url}/v1/models names no model, so it is no SGLang server") from None


def _complete(prompt: Prompt, model: str, config: DriveConfig) -> int:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt.turns[0]}],
        "max_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "custom_params": {LABEL_KEY: {"workload": prompt.workload, "prompt_id": prompt.id}},
    }
    if config.top_k:
        body["top_k"] = config.top_k
    url = f"{config.url}/v1/chat/completions"
    answer = _request(url, json.dumps(body).encode(), f"prompt {prompt.id!r}")
    return int(answer["usage"]["completion_tokens"])


def _request(url: str, data: bytes | None, what: str) -> Any:
    if not url.startswith(("http://", "https://")):
        raise ServerError(f"--engine must be the URL of a server, http://HOST:PORT, got {url!r}")
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    except ValueError as error:
        raise ServerError(f"--engine must be the URL of a server, got {url!r}: {error}") from None
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:MAX_ERROR_TEXT]
        raise ServerError(f"{url} refused {what} with {error.code}: {text}") from None
    except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
        reason = getattr(error, "reason", error)
        raise ServerError(f"cannot reach {url} for {what}: {reason}") from None
    except ValueError as error:
        raise ServerError(f"{url} answered {what} with what is not JSON: {error}") from None
