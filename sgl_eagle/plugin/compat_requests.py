"""What the plugin reads from SGLang's requests and step results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from sgl_eagle_harness.shared_rows import same_truth
from sgl_eagle_harness.types import BoolArray, IntArray

ALL_TOKENS = 1 << 30
"""SGLang's `top_k` of a request that did not set one."""


def is_over(request: Any) -> bool:
    """Whether a step's result no longer belongs to the request.

    Under overlap scheduling a request takes part in one more step after its last.

    Args:
        request: SGLang's `Req`.

    Returns:
        True if it is finished or was retracted.
    """
    return bool(request.finished() or request.is_retracted)


def still_running(requests: Sequence[Any]) -> BoolArray:
    """Whether a step's result still belongs to each request.

    Args:
        requests: B of SGLang's `Req`.

    Returns:
        [B] bool, the opposite of `is_over`; not to be changed.
    """
    over = [request.is_retracted or request.finished() for request in requests]
    return np.logical_not(over) if True in over else same_truth(True, len(over))


def completion_tokens(request: Any, start: int = 0, end: int | None = None) -> IntArray:
    """Tokens that a request has so far.

    Args:
        request: SGLang's `Req`.
        start: First completion token wanted.
        end: First that is not; None for all that are there.

    Returns:
        [L] int64, without those of the step whose result is being processed.
    """
    return np.array(request.output_ids[start:end], np.int64)


def completion_length(request: Any) -> int:
    """How many tokens a request has so far.

    Args:
        request: SGLang's `Req`.

    Returns:
        At least 1 in a decode step: prefill has emitted one.
    """
    return len(request.output_ids)


def completion_lengths(requests: list[Any]) -> list[int]:
    """How many tokens the requests of a batch have so far.

    Args:
        requests: B of SGLang's `Req`.

    Returns:
        B counts, as `completion_length` tells them.
    """
    return [len(request.output_ids) for request in requests]


def last_tokens(requests: list[Any]) -> list[int]:
    """The roots of a batch's next step.

    Args:
        requests: B of SGLang's `Req`.

    Returns:
        B tokens; 0 for a retracted request that starts anew, which has none.
    """
    return [request.output_ids[-1] if request.output_ids else 0 for request in requests]


def prompt_length(request: Any) -> int:
    """Tokens that the client has sent.

    Args:
        request: SGLang's `Req`.

    Returns:
        At least 1.
    """
    return len(request.origin_input_ids)


def cached_lengths(batch: Any) -> list[int]:
    """Tokens before the roots of a batch, as far as the host knows without asking the device.

    Under overlap scheduling a request takes part in one more step after its last, which may have
    filled the context and gone on: what it then has is not counted beyond the context, where no
    costs are known.

    Args:
        batch: SGLang's `ScheduleBatch` in decode mode.

    Returns:
        B counts, at least 1; those of the step before where its result is still on the device.
    """
    if batch.seq_lens_cpu is not None:
        longest = batch.model_config.context_len
        return [min(length, longest) for length in batch.seq_lens_cpu.tolist()]
    # At least 1 also for a retracted request that starts anew.
    return [len(each.origin_input_ids) + len(each.output_ids) - 1 or 1 for each in batch.reqs]


def sampling_of(request: Any) -> dict[str, float]:
    """Effective sampling parameters.

    Args:
        request: SGLang's `Req`.

    Returns:
        Fields of a trace's `SamplingParams`; greedy where SGLang decodes greedily.
    """
    parameters = request.sampling_params
    top_k = int(parameters.top_k)
    if top_k == 1:  # how SGLang spells temperature 0
        return {"temperature": 0.0}
    return {
        "temperature": float(parameters.temperature),
        "top_p": float(parameters.top_p),
        "top_k": 0 if top_k in {-1, ALL_TOKENS} else top_k,
    }


def shapes_its_text(request: Any) -> bool:
    """Whether something other than temperature, top-p and top-k decides the tokens.

    Args:
        request: SGLang's `Req`.

    Returns:
        True under a grammar, a penalty, a bias, `min_p`, a minimum length or a custom processor.
    """
    parameters = request.sampling_params
    return bool(
        request.grammar is not None
        or request.custom_logit_processor is not None
        or parameters.logit_bias
        or parameters.min_p
        or parameters.min_new_tokens
        or parameters.frequency_penalty
        or parameters.presence_penalty
        or parameters.repetition_penalty != 1.0
    )


def ends_at(request: Any) -> list[int]:
    """Tokens at which the model itself ends a text.

    Args:
        request: SGLang's `Req`.

    Returns:
        Ids; one may be there twice.
    """
    ids = [int(token) for token in request.eos_token_ids or ()]
    end = None if request.tokenizer is None else _end_token(request.tokenizer)
    return ids if end is None else [*ids, end]


@lru_cache(maxsize=1)
def _end_token(tokenizer: Any) -> int | None:
    # A server has one tokenizer, which looks its end token up anew each time it is asked.
    return getattr(tokenizer, "eos_token_id", None)


def custom_params(request: Any) -> Mapping[str, Any]:
    """What the client attached to its request.

    Args:
        request: SGLang's `Req`.

    Returns:
        `custom_params` of the sampling parameters; empty where there are none.
    """
    return request.sampling_params.custom_params or {}


def is_on_host(result: Any) -> bool:
    """Whether the device is done with a step, and SGLang's copy of its result with it.

    Asks without waiting.

    Args:
        result: SGLang's `GenerationBatchResult` of a step that overlap scheduling has launched.

    Returns:
        False also before SGLang has asked for the copy.
    """
    copied = result.copy_done
    return copied is not None and bool(copied.query())


def emitted_tokens(result: Any) -> IntArray:
    """Tokens of a step, once SGLang has copied them to the host.

    Args:
        result: SGLang's `GenerationBatchResult` of a verify step.

    Returns:
        [B, M] int64; the first `num_accept_tokens` of a row count.
    """
    tokens = result.next_token_ids.numpy().astype(np.int64)
    return np.asarray(tokens.reshape(len(result.accept_lens), -1))
