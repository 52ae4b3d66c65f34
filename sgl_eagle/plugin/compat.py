"""Every SGLang symbol that the plugin uses, and everything that differs between its versions."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sgl_eagle.plugin.ranks import Ranks
from sgl_eagle.plugin.tree_sampling import draw_tokens
from sgl_eagle_harness.errors import SglEagleError
from sgl_eagle_harness.types import NO_NODE

OLDEST_VERSION = (0, 5, 17)
FIRST_UNKNOWN_VERSION = (0, 6, 0)


class EngineVersionError(SglEagleError, RuntimeError):
    """An SGLang that this plugin does not know."""


def sglang_version() -> str:
    """Version of the installed SGLang.

    Returns:
        E.g. "0.5.21".
    """
    return importlib.metadata.version("sglang")


def require_known_version(version: str) -> None:
    """Refuse a version whose worker interface was never looked at.

    Args:
        version: E.g. "0.5.21" or "0.5.21.post1".

    Raises:
        EngineVersionError: If it is outside the range that pyproject.toml names.
    """
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not OLDEST_VERSION <= numbers < FIRST_UNKNOWN_VERSION:
        raise EngineVersionError(
            f"SGL_EAGLE needs sglang>=0.5.17,<0.6, got sglang {version}; "
            'install one with pip install "sgl-eagle[sglang]"'
        )


def speculative_algorithms() -> Any:
    """SGLang's enumeration of algorithms, which also registers new ones.

    Returns:
        `SpeculativeAlgorithm`.
    """
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SpeculativeAlgorithm


def custom_algorithm_class() -> Any:
    """Base class of registered algorithms.

    Returns:
        `CustomSpecAlgo`.
    """
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    return CustomSpecAlgo


def eagle_worker_class() -> Any:
    """SGLang's own EAGLE worker, whose prefill, draft-extend and memory pools serve here too.

    Returns:
        `EAGLEWorkerV2`.
    """
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    return EAGLEWorkerV2


def hook_registry() -> tuple[Any, Any]:
    """SGLang's registry of hooks on its own functions.

    Returns:
        `HookRegistry` and `HookType`.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    return HookRegistry, HookType


def page_size() -> int:
    """Tokens of one page of the running server's key-value cache.

    Returns:
        The resolved page size.
    """
    from sglang.srt.runtime_context import get_schedule

    return int(get_schedule().page_size)


def prepare_draft_batch(worker: Any, batch: Any) -> Any:
    """Reserve the draft's cache slots and make the batch of its forward passes.

    Args:
        worker: SGLang's draft worker.
        batch: The running batch; its `spec_info` is the latest draft input, which is left as it is:
            a round that verifies no draft hands it on.

    Returns:
        A `ForwardBatch` of B * topk rows, with `out_cache_loc` for all draft steps.
    """
    from sglang.srt.speculative.eagle_worker_common import prepare_for_draft

    with left_as_it_was(batch, ("spec_info",)):
        batch.spec_info = copy.copy(batch.spec_info)
        forward_batch, *_ = prepare_for_draft(  # from 0.5.22 on, three values
            batch.spec_info,
            worker.req_to_token_pool,
            batch,
            None,  # no graph: steps run one by one, since each may be the last
            worker.draft_runner,
            worker.topk,
            worker.speculative_num_steps,
        )
    return forward_batch


def tensor_parallel_group() -> Any:
    """The ranks that hold one model together.

    Returns:
        A `GroupCoordinator`.
    """
    from sglang.srt.distributed import get_tp_group

    return get_tp_group()


def token_table(worker: Any) -> Tensor:
    """SGLang's table of cache slots; its first row is padding's and all zero.

    Args:
        worker: SGLang's draft worker.

    Returns:
        [P, L] int32, a row a request.
    """
    table: Tensor = worker.req_to_token_pool.req_to_token
    return table


def run_draft_step(worker: Any, forward_batch: Any, step: int) -> tuple[Tensor, Tensor]:
    """One forward pass of the draft model over B * topk rows.

    Args:
        worker: SGLang's draft worker, its attention metadata planned.
        forward_batch: Rows with tokens, positions, hidden states and slots of this step.
        step: 0-based draft step, which says how many draft slots a row reads.

    Returns:
        [B * topk, V'] logits and [B * topk, H] hidden states.
    """
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    backend = worker.draft_attn_backend.attn_backends[step]
    with forward_context(ForwardContext(attn_backend=backend)):
        output = worker.draft_runner.forward(forward_batch).logits_output
    return output.next_token_logits, output.hidden_states


@contextlib.contextmanager
def draft_context() -> Iterator[None]:
    """Process-wide settings under which SGLang runs its draft model.

    Yields:
        None.
    """
    from sglang.srt.layers.moe.utils import (
        speculative_moe_a2a_backend_context,
        speculative_moe_backend_context,
    )

    with speculative_moe_backend_context(), speculative_moe_a2a_backend_context():
        yield


def copy_cache_rows(runner: Any, source: Tensor, destination: Tensor) -> None:
    """Copy key-value rows of every layer of the draft; the two may overlap.

    SGLang's own copy kernel reads and writes block by block, which a permutation of rows would
    corrupt; indexing reads everything first.

    Args:
        runner: The draft's model runner.
        source: [R] int64 slots.
        destination: [R] int64 slots, distinct.
    """
    pool = runner.token_to_kv_pool
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[destination] = buffer[source]


def tree_mask_layout(target_worker: Any, num_rows: int) -> tuple[bool, Tensor | None]:
    """How the target's attention reads the tree mask, and where from.

    Args:
        target_worker: Owner of the attention backend.
        num_rows: B.

    Returns:
        True for mask rows over prefix and tree, False for rows over the tree alone; the backend's
        own buffer, None where it has none or B is more than it holds.
    """
    from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode

    backend = target_worker.model_runner.attn_backend
    mask = getattr(backend, "verify_mask", None)
    if mask is not None:
        return mask.mode == TreeMaskMode.FULL_MASK, mask.buffer if mask.fits(num_rows) else None
    # On a CPU the default is what its AMX backend reads, whichever backend runs.
    return default_tree_mask_mode() == TreeMaskMode.FULL_MASK or not _is_amx(backend), None


def reads_mask_late(target_worker: Any) -> bool:
    """Whether the target's attention looks at the tree mask only while the pass runs.

    FlashAttention-3 makes page tables of it, and FlashInfer packs it, when a pass is prepared.

    Args:
        target_worker: Owner of the attention backend.

    Returns:
        True for SGLang's Triton backend; False for every other one, known or not.
    """
    return _is_triton(target_worker.model_runner.attn_backend)


def _is_amx(backend: Any) -> bool:
    from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend

    return isinstance(backend, IntelAMXAttnBackend)


def _is_triton(backend: Any) -> bool:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    return isinstance(backend, TritonAttnBackend)


def make_verify_input(**fields: Any) -> Any:
    """SGLang's description of the trees to verify.

    Args:
        **fields: Token, mask, position and link arrays, and the sizes.

    Returns:
        An `EagleVerifyInput`.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    return EagleVerifyInput(
        **fields,
        retrieve_cum_len=None,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )


def run_verify(
    worker: Any, batch: Any, *, num_draft_tokens: int, num_steps: int, grammar_barrier: Any
) -> Any:
    """Target pass over the trees in `batch.spec_info`, sampling and compaction.

    Args:
        worker: Our worker.
        batch: The running batch.
        num_draft_tokens: Nodes of every tree, root included.
        num_steps: Depth of the deepest tree.
        grammar_barrier: What the scheduler passed.

    Returns:
        A `GenerationBatchResult`; its draft input lacks the children that draft-extend adds.
    """
    from sglang.srt.speculative.eagle_worker_common import run_eagle_verify

    arguments: dict[str, Any] = {
        "target_worker": worker.target_worker,
        "req_to_token_pool": worker.req_to_token_pool,
        "token_to_kv_pool_allocator": worker.token_to_kv_pool_allocator,
        "plan_stream": worker.plan_stream,
        "plan_stream_ctx": worker.plan_stream_ctx,
        "topk": worker.topk,
        "num_steps": num_steps,  # 0.5.17
        "num_draft_tokens": num_draft_tokens,
        "device": worker.device,
        "metadata_ready_pre_pad": False,
        "finalize_tree_path": True,
        "grammar_barrier": grammar_barrier,
    }
    return _call_with_known(run_eagle_verify, batch, arguments)


def run_builtin_step(step: Any, batch: Any, **arguments: Any) -> Any:
    """One step of SGLang's own EAGLE: prefill, and idle batches.

    Args:
        step: Its bound `forward_batch_generation`.
        batch: What runs.
        **arguments: What the scheduler passed, by name; those that this version lacks are None.

    Returns:
        A `GenerationBatchResult`.
    """
    return _call_with_known(step, batch, arguments)  # pp_proxy_tensors: from 0.5.19 on


def _call_with_known(function: Any, batch: Any, arguments: dict[str, Any]) -> Any:
    known = _parameters(getattr(function, "__func__", function))
    return function(batch, **{name: arguments[name] for name in arguments if name in known})


@functools.cache
def _parameters(function: Any) -> frozenset[str]:
    # Kept, since every round calls the same two, and to look takes as long as some of its stages.
    return frozenset(inspect.signature(function).parameters)


def make_plain_input(worker: Any, batch: Any) -> Any:
    """SGLang's description of trees that are their roots alone.

    Args:
        worker: Our worker.
        batch: The running batch, with the latest draft input.

    Returns:
        An `EagleVerifyInput` of one node a request.
    """
    verify_input = worker._build_trivial_verify_input(batch)
    # Without overlap scheduling it is int32, which the CUDA kernels of verification refuse.
    verify_input.draft_token = verify_input.draft_token.to(torch.int64)
    return verify_input


def prepare_verify_ahead(worker: Any, batch: Any, verify_input: Any) -> None:
    """Let a later `run_verify` of this input find its preparation done.

    Args:
        worker: Our worker, in the runtime state of the input's size.
        batch: The running batch; left as it was.
        verify_input: Its tensors may be filled in later, in place.
    """
    from sglang.srt.speculative import eagle_worker_common as common

    if getattr(common.eagle_prepare_for_verify, "func", None) is not _prepare_for_verify:
        common.eagle_prepare_for_verify = functools.partial(
            _prepare_for_verify, common.eagle_prepare_for_verify
        )
    with left_as_it_was(batch, _SET_BY_PREPARATION):
        batch.spec_info = verify_input
        prepared = common.eagle_prepare_for_verify(
            verify_input, worker.req_to_token_pool, batch, worker.target_worker
        )
        verify_input.prepared_ahead = (
            prepared,
            {name: getattr(batch, name) for name in _SET_BY_PREPARATION},
        )


_SET_BY_PREPARATION = ("spec_info", "forward_mode", "input_ids", "out_cache_loc")


@contextlib.contextmanager
def left_as_it_was(batch: Any, names: tuple[str, ...]) -> Iterator[None]:
    """Give a batch its fields back, whatever SGLang makes of them in between.

    Args:
        batch: The running batch.
        names: Its fields.

    Yields:
        None.
    """
    before = {name: getattr(batch, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(batch, name, value)


def _prepare_for_verify(original: Any, verify_input: Any, pool: Any, batch: Any, *args: Any) -> Any:
    ahead = getattr(verify_input, "prepared_ahead", None)
    if ahead is None:
        return original(verify_input, pool, batch, *args)
    prepared, fields = ahead
    for name, value in fields.items():
        setattr(batch, name, value)
    return prepared


def replace_sampler() -> None:
    """Make verification sample where SGLang's would not.

    On a CPU it commits the most probable token whatever the temperature, and it never applies
    `min_p`. Its own call comes first: that applies penalties, bias and grammar to the logits.
    """
    from sglang.srt.speculative import eagle_worker_common

    if getattr(eagle_worker_common.eagle_sample, "func", None) is not _sample:
        sampler = functools.partial(_sample, eagle_worker_common.eagle_sample)
        eagle_worker_common.eagle_sample = sampler


def _sample(
    original: Any, verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any
) -> Any:
    from sglang.srt.speculative.eagle_utils import verify_tree_greedy_func

    chosen = original(verify_input, batch, logits_output, *args, **kwargs)
    sampling = batch.sampling_info
    ignored = batch.device == "cpu" or sampling.need_min_p_sampling
    if sampling.is_all_greedy or batch.forward_mode.is_idle() or not ignored:
        return chosen
    num_draft_tokens = verify_input.draft_token_num
    rows = {
        "temperatures": sampling.temperatures.flatten(),
        "top_ks": sampling.top_ks,
        "top_ps": sampling.top_ps,
        "min_ps": sampling.min_ps,
    }
    drawn = draw_tokens(
        logits_output.next_token_logits,
        **{name: values.repeat_interleave(num_draft_tokens) for name, values in rows.items()},
    )
    # Each rank draws with a generator of its own.
    Ranks(tensor_parallel_group()).share_tensor(drawn)
    predict, num_accept_tokens, accept_index = chosen
    predict, accept_index, num_correct_drafts = verify_tree_greedy_func(
        predicts=torch.zeros_like(predict),
        accept_index=torch.full_like(accept_index, NO_NODE),
        accept_token_num=torch.empty_like(num_accept_tokens),
        candidates=verify_input.draft_token.view(-1, num_draft_tokens),
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=verify_input.retrieve_next_token,
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=drawn.view(-1, num_draft_tokens),
        topk=verify_input.tree_topk,
    )
    return predict, num_correct_drafts + 1, accept_index


def draft_head_weight(worker: Any) -> Tensor:
    """The full LM head that the draft model loaded or shares with the target.

    Args:
        worker: SGLang's draft worker.

    Returns:
        [V', H], without the rows that SGLang pads it with.
    """
    model = worker.draft_runner.model
    weight: Tensor = model.lm_head.weight
    num_tokens = getattr(model.config, "draft_vocab_size", None) or model.config.vocab_size
    return weight.detach()[:num_tokens]


def replace_draft_scorer(worker: Any, scorer: Any) -> None:
    """Score the vocabulary by another method in all passes of the draft model.

    Args:
        worker: SGLang's draft worker.
        scorer: Called with [n, H] hidden states and what SGLang passes beside them.

    Raises:
        EngineVersionError: If its passes score the vocabulary in a way that is not known here.
    """
    processor = worker.draft_runner.model.logits_processor
    if not hasattr(processor, "_get_logits"):
        raise EngineVersionError(
            f"sglang {sglang_version()} scores a draft's vocabulary by {type(processor).__name__}, "
            "which SGL_EAGLE does not know; --sgl-eagle-lm-head full leaves it alone"
        )
    processor._get_logits = scorer


def hot_tokens(worker: Any) -> Tensor | None:
    """Target ids of a reduced draft vocabulary.

    Args:
        worker: SGLang's draft worker.

    Returns:
        [V'] int64, or None where the vocabularies are the same.
    """
    ids: Tensor | None = worker.hot_token_id
    return None if ids is None else ids.to(torch.int64)
