"""SGLang symbols that plain decoding needs: the target's decode pass and sampler, without trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sgl_eagle.plugin import compat
from sgl_eagle.plugin.ranks import Ranks

_SET_BY_DECODING = (
    *("spec_info", "input_ids", "out_cache_loc"),
    *("seq_lens", "seq_lens_cpu", "seq_lens_sum"),
)


def needs_verification(batch: Any) -> bool:
    """Whether SGLang would have to verify this batch even without drafts.

    Args:
        batch: SGLang's running batch.

    Returns:
        True under a grammar, and where log-probabilities or hidden states are asked for: those of
        speculative batches come from verification alone.
    """
    return bool(batch.has_grammar or batch.return_logprob or batch.return_hidden_states)


def run_decode(
    worker: Any,
    batch: Any,
    *,
    keeps_features: bool,
    on_publish: Callable[[Tensor], None] | None,
) -> Any:
    """Decode one token a request as SGLang does without speculation; the batch is left as it was.

    Args:
        worker: Our worker, in its plain runtime state.
        batch: The running batch, with the latest draft input.
        keeps_features: Whether the target's hidden states are wanted, for the draft to catch up.
        on_publish: Called with the new lengths, if given: before the pass, which does not decide
            them, so that what SGLang prepares for the next round need not wait for it.

    Returns:
        A `GenerationBatchResult` as of verifying the root alone; its draft input has the root's
        children of before.
    """
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    runner = worker.target_worker.model_runner
    draft_input, lengths = batch.spec_info, batch.seq_lens
    with compat.left_as_it_was(batch, _SET_BY_DECODING):
        # Decoding counts the token that is being decoded among the cached ones.
        batch.spec_info = None
        batch.input_ids = draft_input.bonus_tokens.to(torch.int64)
        slots = compat.token_table(worker)[batch.req_pool_indices, lengths]
        batch.out_cache_loc = slots.to(torch.int64)
        batch.seq_lens = lengths + 1
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.seq_lens_sum = None
        forward_batch = ForwardBatch.init_new(
            batch,
            runner,
            capture_hidden_mode=(
                CaptureHiddenMode.FULL if keeps_features else CaptureHiddenMode.NULL
            ),
            return_hidden_states_before_norm=False,
        )
        new_lengths = batch.seq_lens
    if on_publish is not None:
        on_publish(new_lengths)
    output = worker.target_worker.forward_batch_generation(
        batch=None, forward_batch=forward_batch, is_verify=True
    )
    tokens = runner.sample(output.logits_output, forward_batch)
    Ranks(compat.tensor_parallel_group()).share_tensor(tokens)
    return GenerationBatchResult(
        logits_output=output.logits_output,
        next_token_ids=tokens,
        can_run_cuda_graph=output.can_run_cuda_graph,
        speculative_num_draft_tokens=1,
        next_draft_input=EagleDraftInput(
            topk_p=draft_input.topk_p,
            topk_index=draft_input.topk_index,
            hidden_states=draft_input.hidden_states,
            bonus_tokens=tokens,
        ),
        accept_lens=_bonus_token_alone(len(tokens)),
        new_seq_lens=new_lengths,
        extra_keep_alive_refs=[forward_batch],
    )


@lru_cache(maxsize=1)
def _bonus_token_alone(num_rows: int) -> Tensor:
    # On the host, where SGLang reads it: what is known need not be made and copied in every round.
    return torch.ones(num_rows, dtype=torch.int32)


_SET_BY_CATCHING_UP = (
    *("spec_info", "forward_mode", "input_ids", "out_cache_loc", "prefix_lens", "extend_lens"),
    *("extend_num_tokens", "seq_lens", "seq_lens_cpu", "seq_lens_sum"),
)


def catch_up(
    worker: Any,
    batch: Any,
    *,
    counts: Tensor,
    take: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]],
    num_tokens: int,
) -> Any:
    """Let the draft see what plain rounds have decoded; the batch is left as it was.

    Args:
        worker: Our worker, in a runtime state of that size.
        batch: The running batch, with the latest draft input.
        counts: [B] int64 on the host, tokens that the draft has not seen, at most `num_tokens`.
        take: Tokens and features, as `DraftBacklog.take` gives them.
        num_tokens: Tokens of a request that are extended at once.

    Returns:
        The batch's draft input, with the roots' children; those of requests that the draft had
        seen everything of are as before.
    """
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    draft_input, table = batch.spec_info, compat.token_table(worker)
    on_device = send(counts, batch.seq_lens.device)
    with compat.left_as_it_was(batch, _SET_BY_CATCHING_UP):
        batch.seq_lens = batch.seq_lens - on_device
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu = batch.seq_lens_cpu - counts
        batch.seq_lens_sum = None
        places = batch.seq_lens[:, None] + torch.arange(num_tokens, device=table.device)
        slots = table[batch.req_pool_indices[:, None], places]
        batch.out_cache_loc = slots.flatten().to(torch.int64)
        tokens, features = take(batch.req_pool_indices, batch.seq_lens, num_tokens)
        result = GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None, hidden_states=features),
            next_token_ids=tokens,
            accept_lens=on_device.clamp(min=1).to(torch.int32),
            next_draft_input=EagleDraftInput(bonus_tokens=draft_input.bonus_tokens),
        )
        worker.draft_worker._draft_extend_for_decode(batch, result)
    _forget_read_event(worker.draft_worker.draft_runner)
    caught_up = result.next_draft_input
    if not counts.all():
        behind = (on_device > 0)[:, None]
        for name in ("topk_p", "topk_index", "hidden_states"):
            new, old = getattr(caught_up, name), getattr(draft_input, name)
            setattr(caught_up, name, new.where(behind, old))
    caught_up.future_indices = draft_input.future_indices
    return caught_up


def _forget_read_event(runner: Any) -> None:
    # It would tell SGLang that the step has read the table of slots, while the step has just begun.
    for name in ("war_fastpath_read_done_event", "shared_read_done_event"):  # 0.5.17; 0.5.21
        if hasattr(runner, name):
            setattr(runner, name, None)


def send(values: Tensor, device: Any) -> Tensor:
    """Copy numbers of the host to the device without waiting for either.

    Args:
        values: On the host.
        device: Where to.

    Returns:
        The copy.
    """
    # Torch's pinned allocator keeps the memory until the copy is done.
    pinned = values.pin_memory() if torch.device(device).type == "cuda" else values
    return pinned.to(device, non_blocking=True)


def leave_out_draft_prefill(draft_worker: Any) -> None:
    """Keep SGLang from running the draft over prompts: nobody will ever draft.

    Args:
        draft_worker: SGLang's draft worker.
    """
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    def make_draft_input(batch: Any, features: Any, tokens: Any, *_: Any, **__: Any) -> Any:
        del batch, features
        draft_input = EagleDraftInput(bonus_tokens=tokens)
        leave_out_children(draft_input, topk=draft_worker.topk)
        return draft_input

    draft_worker._draft_extend_for_prefill = make_draft_input


def leave_out_children(draft_input: Any, *, topk: int) -> None:
    """Stand in for the roots' children where nobody will ever draft.

    Args:
        draft_input: SGLang's `EagleDraftInput`; without overlap scheduling, SGLang joins batches
            by its children.
        topk: Children of a root.
    """
    tokens = draft_input.bonus_tokens
    shape = (len(tokens), topk)
    draft_input.topk_p = torch.zeros(shape, device=tokens.device)
    draft_input.topk_index = torch.zeros(shape, dtype=torch.int64, device=tokens.device)


def build_plain_state(worker: Any, state: Any, *, keeps_features: bool) -> Any:
    """Capture the target's graphs of plain decoding.

    Args:
        worker: Our worker.
        state: SGLang's record of the graphs that verify roots alone; its draft-extend is kept.
        keeps_features: Whether the target's hidden states are wanted.

    Returns:
        SGLang's record of the graphs and their attention backends.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.model_executor.runner import DecodeCudaGraphRunner

    mode = CaptureHiddenMode.FULL if keeps_features else CaptureHiddenMode.NULL

    class PlainDecodeGraphs(DecodeCudaGraphRunner):  # type: ignore[misc]  # untyped base
        # SGLang sets it from a server argument, and captures what it says.
        return_hidden_states_mode = property(lambda _: mode, lambda *_: None)

    runner = worker.target_worker.model_runner
    algorithm, workspace = runner.spec_algorithm, runner.init_new_workspace
    # The runner of a speculative model captures verification.
    runner.spec_algorithm = compat.speculative_algorithms().NONE
    try:
        backend = runner._get_attention_backend(init_new_workspace=True)
        graphs = PlainDecodeGraphs(runner, attn_backend=backend)
    finally:
        runner.spec_algorithm, runner.init_new_workspace = algorithm, workspace
    return dataclasses.replace(state, target_attn_backend=backend, target_graph_runner=graphs)
