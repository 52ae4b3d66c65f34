"""SGLang symbols that CUDA graphs need: captured draft steps, and graphs of each verify size."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def captures_graphs(device: str) -> bool:
    """Whether the server decodes in CUDA graphs.

    Args:
        device: Of the worker.

    Returns:
        False on a CPU and under --disable-cuda-graph.
    """
    from sglang.srt.model_executor.cuda_graph_config import (
        Backend,
        Phase,
        check_cuda_graph_backend,
    )

    return device == "cuda" and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)


def captured_batch_sizes(draft_worker: Any) -> list[int]:
    """Batch sizes that SGLang captures; others are padded up to them.

    Args:
        draft_worker: SGLang's draft worker.

    Returns:
        Ascending.
    """
    from sglang.srt.model_executor.runner import get_batch_sizes_to_capture

    sizes, _ = get_batch_sizes_to_capture(draft_worker.draft_runner)
    return sorted(int(size) for size in sizes)


def leave_out_draft_loop(draft_worker: Any) -> None:
    """Keep SGLang from capturing its draft loop, which has no stop points; draft-extend stays.

    Args:
        draft_worker: SGLang's draft worker.
    """
    capture = draft_worker._capture_cuda_graphs

    def capture_draft_extend() -> None:
        num_steps = draft_worker.speculative_num_steps
        draft_worker.speculative_num_steps = 1  # one step has no loop to capture
        try:
            capture()
        finally:
            draft_worker.speculative_num_steps = num_steps

    draft_worker._capture_cuda_graphs = capture_draft_extend


def draft_hidden_states(draft_worker: Any) -> tuple[int, torch.dtype, Any]:
    """What a draft step hands to the next.

    Args:
        draft_worker: SGLang's draft worker.

    Returns:
        Size, dtype and device of a hidden state.
    """
    from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec

    size, dtype = get_draft_recurrent_hidden_state_spec(draft_worker.draft_runner)
    return int(size), dtype, draft_worker.draft_runner.device


def seq_len_of_padding(draft_worker: Any) -> int:
    """Length that padding rows pretend to have.

    Args:
        draft_worker: SGLang's draft worker.

    Returns:
        At least 1.
    """
    backend = draft_worker.draft_attn_backend.attn_backends[0]
    return int(backend.get_cuda_graph_seq_len_fill_value())


def reads_slots_early(draft_worker: Any) -> bool:
    """Whether the attention of draft steps copies the slots of all steps when it is planned.

    FlashAttention-3 makes a page table of each branch from them; Triton and FlashInfer look up the
    same slots in SGLang's table. By name: to import the class takes kernels that a server without
    it may lack.

    Args:
        draft_worker: SGLang's draft worker.

    Returns:
        True for FlashAttention.
    """
    return _is_a(draft_worker.draft_attn_backend, "FlashAttentionMultiStepBackend")


def _is_a(backend: Any, name: str) -> bool:
    return name in {cls.__name__ for cls in type(backend).__mro__}


def make_captured_batch(
    draft_worker: Any,
    *,
    seq_lens: Tensor,
    pool_indices: Tensor,
    positions: Tensor,
    out_cache_loc: Tensor,
    hidden: Tensor,
) -> Any:
    """The batch that draft steps are captured with.

    Args:
        draft_worker: SGLang's draft worker.
        seq_lens: [R] int64.
        pool_indices: [R] int64.
        positions: [R * T] int64.
        out_cache_loc: [R * T * S] int64.
        hidden: [R * T, H].

    Returns:
        A `ForwardBatch`; each step sets tokens, slots and hidden states.
    """
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    num_rows = len(seq_lens)
    branches = len(positions) // num_rows
    spec_info = EagleDraftInput(
        hidden_states=hidden,
        capture_hidden_mode=CaptureHiddenMode.LAST,
        num_tokens_per_req=branches,
        num_tokens_for_logprob_per_req=branches,
    )
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=num_rows,
        input_ids=positions,  # replaced before it is read
        req_pool_indices=pool_indices,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens.cpu(),
        seq_lens_sum=int(seq_lens.sum()),
        out_cache_loc=out_cache_loc,
        positions=positions,
        return_logprob=False,
        spec_algorithm=draft_worker.draft_runner.spec_algorithm,
        spec_info=spec_info,
        capture_hidden_mode=CaptureHiddenMode.LAST,
    )


@contextlib.contextmanager
def capturing() -> Iterator[torch.cuda.Stream]:
    """Process-wide state in which SGLang captures graphs.

    Yields:
        The stream to capture on.
    """
    from sglang.srt.distributed.parallel_state import graph_capture
    from sglang.srt.model_executor.runner import model_capture_mode

    gc.collect()  # nothing may be freed while a graph is recorded
    with model_capture_mode(), graph_capture() as context:
        yield context.stream


def capture_graph(segment: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Capture device work in SGLang's own memory pool of graphs.

    What outlives the segment must be written to memory from outside the pool.

    Args:
        segment: The work; run three times.
        stream: From `capturing`.

    Returns:
        The graph.
    """
    from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_memory_pool

    device_module = torch.get_device_module("cuda")
    for _ in range(2):  # kernels are compiled and loaded before anything is recorded
        device_module.synchronize()
        segment()
    device_module.synchronize()
    graph = torch.cuda.CUDAGraph()
    pool = get_or_create_global_graph_memory_pool(device_module)
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        segment()
    return graph


@contextlib.contextmanager
def attention_context(backend: Any) -> Iterator[None]:
    """SGLang's context in which its model layers find their attention backend.

    Args:
        backend: The backend, of one step or of several.

    Yields:
        None.
    """
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    with forward_context(ForwardContext(attn_backend=backend)):
        yield


def build_verify_state(worker: Any, num_draft_tokens: int) -> Any:
    """Capture the target and draft-extend graphs of one verify size.

    Args:
        worker: Our worker.
        num_draft_tokens: Nodes of every tree, root included.

    Returns:
        SGLang's record of the graphs and their attention backends.
    """
    with _draft_extend_of(num_draft_tokens):
        # One draft step: the draft loop's graphs and backends do not depend on the verify size.
        return worker.build_adaptive_runtime_state(1, num_draft_tokens)


@contextlib.contextmanager
def _draft_extend_of(num_draft_tokens: int) -> Iterator[None]:
    # SGLang 0.5.17 captures draft-extend as wide as the server's limit, whatever the state's size,
    # and then finds that the graph does not fit.
    from sglang.srt.speculative import eagle_draft_extend_cuda_graph_runner as runner

    resolve = runner.resolve_num_tokens_per_req

    def resolve_width(*, phase: str, **arguments: Any) -> int:
        if phase == "draft_extend":
            return num_draft_tokens
        return int(resolve(phase=phase, **arguments))

    runner.resolve_num_tokens_per_req = resolve_width
    try:
        yield
    finally:
        runner.resolve_num_tokens_per_req = resolve


def current_verify_state(worker: Any) -> Any:
    """The graphs of the server's own limit, which SGLang has captured already.

    Args:
        worker: Our worker.

    Returns:
        SGLang's record of the graphs and their attention backends.
    """
    from sglang.srt.speculative.adaptive_runtime_state import SpecRuntimeState

    draft, target = worker.draft_worker, worker.target_worker.model_runner
    return SpecRuntimeState(
        speculative_num_steps=1,
        speculative_num_draft_tokens=draft.speculative_num_draft_tokens,
        draft_attn_backend=draft.draft_attn_backend,
        cuda_graph_runner=None,
        target_attn_backend=target.attn_backend,
        target_graph_runner=target.decode_cuda_graph_runner,
        draft_extend_attn_backend=draft.draft_extend_attn_backend,
        cuda_graph_runner_for_draft_extend=draft.cuda_graph_runner_for_draft_extend,
    )


def apply_verify_state(worker: Any, state: Any) -> None:
    """Let the next verify and draft-extend run in the graphs of one verify size.

    Args:
        worker: Our worker.
        state: From `build_verify_state` or `current_verify_state`.
    """
    draft, target = worker.draft_worker, worker.target_worker.model_runner
    target.attn_backend = state.target_attn_backend
    target.decode_cuda_graph_runner = state.target_graph_runner
    draft.draft_extend_attn_backend = state.draft_extend_attn_backend
    if state.draft_extend_attn_backend is not None:
        draft.draft_runner.attn_backend = state.draft_extend_attn_backend
    draft.cuda_graph_runner_for_draft_extend = state.cuda_graph_runner_for_draft_extend


def set_eager_verify_size(worker: Any, num_draft_tokens: int) -> None:
    """Let the next verify without graphs find the size of its trees, whichever attention runs.

    FlashAttention's remembers one size, where others ask the trees.

    Args:
        worker: Our worker.
        num_draft_tokens: Nodes of every tree, root included.
    """
    backend = worker.target_worker.model_runner.attn_backend
    parts = (getattr(backend, name, None) for name in ("prefill_backend", "decode_backend"))
    for part in (backend, *parts):
        if _is_a(part, "FlashAttentionBackend"):
            part.speculative_num_draft_tokens = num_draft_tokens
