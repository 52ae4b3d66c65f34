"""SGLang symbols that the draft's cache needs: its features, and a pass that writes it alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sgl_eagle.plugin import compat_graphs


def target_features(draft_worker: Any) -> tuple[int, torch.dtype, Any]:
    """What the draft reads of the target.

    Args:
        draft_worker: SGLang's draft worker.

    Returns:
        Size, dtype and device of the features of one token.
    """
    from sglang.srt.speculative.eagle_utils import get_draft_input_from_target_hidden_dim

    runner = draft_worker.draft_runner
    size = get_draft_input_from_target_hidden_dim(runner)
    return int(size), runner.model_config.dtype, runner.device


def has_one_attention(draft_worker: Any) -> bool:
    """Whether keys and values of one plain attention layer are all that the draft remembers.

    They then depend on the token, its position and its features alone. Of a deeper draft they
    depend on what the layers below have attended to.

    Args:
        draft_worker: SGLang's draft worker.

    Returns:
        False also for positions of several dimensions, which SGLang finds by request.
    """
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    runner = draft_worker.draft_runner
    num_layers = sum(isinstance(part, RadixAttention) for part in runner.model.modules())
    pool = runner.token_to_kv_pool
    return (
        num_layers == 1
        and type(pool) is MHATokenToKVPool  # others store something else, or elsewhere
        and len(pool.k_buffer) == 1
        and not runner.model_config.model_is_mrope
    )


class _CacheWrittenError(Exception):
    """Ends a pass of the draft."""


class _CacheWriting:
    # An attention backend, as far as a pass asks for one before its end.
    def __init__(self, pool: Any) -> None:
        self.token_to_kv_pool = pool

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> None:
        del q
        if save_kv_cache:  # else the model has written it by a fused kernel
            slots = forward_batch.out_cache_loc
            self.token_to_kv_pool.set_kv_buffer(layer, slots, k, v, layer.k_scale, layer.v_scale)
        raise _CacheWrittenError


@contextlib.contextmanager
def _without_queries(model: Any) -> Iterator[None]:
    # Two thirds of the projection's products or more. Where its weight is another matrix than that
    # of a plain product, queries are computed with the rest.
    from sglang.srt.layers.linear import QKVParallelLinear
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    plain = [
        part
        for part in model.modules()
        if type(part) is QKVParallelLinear
        and type(part.quant_method) is UnquantizedLinearMethod
        and not getattr(part, "use_intel_amx_backend", False)
        and part.bias is None
    ]
    for part in plain:
        part.forward = _KeysAndValues(part.weight, part.q_proj_shard_size)
    try:
        yield
    finally:
        for part in plain:
            del part.forward


class _KeysAndValues:
    def __init__(self, weight: Tensor, num_queries: int) -> None:
        self._weight, self._num_queries = weight, num_queries

    def __call__(self, x: Tensor) -> tuple[Tensor, None]:
        projected = x.new_empty(len(x), len(self._weight))  # of queries, whatever was there
        width = self._num_queries
        torch.mm(x, self._weight[width:].T, out=projected[:, width:])
        return projected, None


def write_cache(
    draft_worker: Any, *, tokens: Tensor, features: Tensor, positions: Tensor, slots: Tensor
) -> bool:
    """Run the draft as far as its keys and values, without queries and what would follow.

    Neither attends a token to another nor needs attention metadata, so a graph may be captured of
    it wherever its arguments are. On several ranks all end at the same place.

    Args:
        draft_worker: SGLang's draft worker, of a draft with one attention layer.
        tokens: [n] int64, each the one after its position.
        features: [n, F] of the target.
        positions: [n] int64.
        slots: [n] int64 where keys and values go; slot 0 is SGLang's padding.

    Returns:
        Whether the pass ended at its attention; else nothing is known of the cache.
    """
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    runner = draft_worker.draft_runner
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,  # as if each token were a request
        batch_size=len(tokens),
        input_ids=tokens,
        req_pool_indices=slots,  # nobody reads these three
        seq_lens=positions,
        seq_lens_sum=0,
        out_cache_loc=slots,
        positions=positions,
        return_logprob=False,
        spec_algorithm=runner.spec_algorithm,
        spec_info=EagleDraftInput(
            hidden_states=features, capture_hidden_mode=CaptureHiddenMode.LAST
        ),
        capture_hidden_mode=CaptureHiddenMode.LAST,
    )
    backend = _CacheWriting(runner.token_to_kv_pool)
    try:
        with (
            torch.no_grad(),
            compat_graphs.attention_context(backend),
            _without_queries(runner.model),
        ):
            runner.model.forward(tokens, positions, forward_batch)
    except _CacheWrittenError:
        return True
    return False
