"""The LM head that drafts propose with: SGLang's own, or the two-stage head of the checkpoint."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgl_eagle.plugin import compat
from sgl_eagle.plugin.self_check import ServerConfigError
from sgl_eagle.plugin.server_flags import LM_HEAD_FLAG, LmHead
from sgl_eagle.reference.draft_models import HEAD_ROWS
from sgl_eagle.reference.head_checkpoint import (
    StoredHead,
    describe_head,
    load_two_stage_head,
    wants_two_stage_head,
)
from sgl_eagle_kernels.lm_head import HeadTopk, rank_tokens

logger = logging.getLogger(__name__)

_STEP_BELOW = 1e-3  # nats that other tokens stay below the best ones


class TwoStageLogits:
    """Stands in for the method by which SGLang's draft model scores its vocabulary.

    Draft steps take the head's input from the model and rank it themselves. Draft-extend, whose
    code is SGLang's, gets scores of the whole vocabulary from which its softmax and top-k make the
    same tokens and probabilities.

    Attributes:
        stored: The head, and the file that its factors came from.
    """

    def __init__(self, stored: StoredHead, topk: int) -> None:
        """Take over a head.

        Args:
            stored: The head.
            topk: Children of a node.
        """
        self.stored = stored
        self._topk = topk
        self._passes_inputs = False

    def __call__(
        self, hidden_states: Tensor, lm_head: Any, metadata: Any, *_args: Any, **_kwargs: Any
    ) -> Tensor:
        """Score rows.

        Args:
            hidden_states: [n, H].
            lm_head: SGLang's own head, which is not read.
            metadata: SGLang's; may have a buffer that captured graphs share for their scores.
            *_args: What SGLang passes beside them.
            **_kwargs: The same by name.

        Returns:
            [n, V'] float32 scores, or the hidden states where they are passed on.
        """
        del lm_head
        if self._passes_inputs:
            return hidden_states
        scores = spread_top(self.rank(hidden_states), self.stored.head.num_tokens)
        buffer: Tensor | None = getattr(metadata, "next_token_logits_buffer", None)
        if buffer is not None and buffer.shape == scores.shape:
            return buffer.copy_(scores)
        return scores

    @contextlib.contextmanager
    def passing_inputs(self) -> Iterator[None]:
        """Let the model return the head's input in place of scores.

        Yields:
            None.
        """
        self._passes_inputs = True
        try:
            yield
        finally:
            self._passes_inputs = False

    def rank(self, head_input: Tensor) -> HeadTopk:
        """The best tokens of some rows.

        Args:
            head_input: [n, H].

        Returns:
            By draft id, normalised over the whole vocabulary.
        """
        # On a CPU the rows of the full head that shortlists gather would fill the memory.
        size = len(head_input) if head_input.is_cuda else HEAD_ROWS
        parts = [
            rank_tokens(rows, self.stored.head, self._topk)
            for rows in head_input.split(max(size, 1))
        ]
        return HeadTopk(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def spread_top(found: HeadTopk, num_tokens: int) -> Tensor:
    """Scores whose softmax gives the best tokens their probabilities.

    The probability of all others is spread evenly over them, below that of the best.

    Args:
        found: The best K of each row.
        num_tokens: V', above K.

    Returns:
        [n, V'] float32; NaN in rows that are not finite.
    """
    topk = found.ids.shape[1]
    rest = 1.0 - found.log_probs.exp().sum(dim=-1)
    share = rest.clamp(min=torch.finfo(torch.float32).tiny) / (num_tokens - topk)
    others = torch.minimum(share.log(), found.log_probs[:, -1] - _STEP_BELOW)
    scores = others[:, None].repeat(1, num_tokens).scatter_(1, found.ids, found.log_probs)
    return scores.masked_fill_(~found.is_finite[:, None], torch.nan)


def install_draft_head(
    worker: Any, folder: Path, choice: LmHead | None, *, tensor_parallel_size: int
) -> None:
    """Make SGLang's draft model propose with the two-stage head of its checkpoint.

    Args:
        worker: SGLang's draft worker, its weights loaded and no graph captured.
        folder: Draft checkpoint; a draft that is no local folder keeps its head.
        choice: None takes the two-stage head where the configuration has one, on one rank.
        tensor_parallel_size: Ranks that share a head.

    Raises:
        ServerConfigError: If the head cannot serve with these arguments.
        CheckpointError: If it is wanted and missing, or was made for another head.
    """
    if not (folder / "config.json").is_file() or not wants_two_stage_head(folder, choice):
        return
    if choice is None and tensor_parallel_size > 1:
        logger.info(
            "SGL_EAGLE drafts with the full LM head: the two-stage head of %s serves one rank, "
            "--tp-size is %d",
            *(folder, tensor_parallel_size),
        )
        return
    _require(folder, "--tp-size", tensor_parallel_size, 1)
    stored = load_two_stage_head(folder, compat.draft_head_weight(worker), choice)
    assert stored is not None
    topk = int(worker.topk)
    _require(folder, "--speculative-eagle-topk", topk, stored.head.most_topk)
    worker.sgl_eagle_head = TwoStageLogits(stored, topk)
    compat.replace_draft_scorer(worker, worker.sgl_eagle_head)
    logger.info(
        "SGL_EAGLE drafts with a %s; %s full drafts with the draft's own",
        *(describe_head(stored.head), LM_HEAD_FLAG),
    )


def _require(folder: Path, flag: str, value: int, most: int) -> None:
    if value > most:
        raise ServerConfigError(
            f"{flag} must be at most {most} with the two-stage LM head of {folder}, got {value}; "
            f"{LM_HEAD_FLAG} full drafts with its full head"
        )


def served_head(worker: Any) -> TwoStageLogits | None:
    """The two-stage head that drafts.

    Args:
        worker: SGLang's draft worker.

    Returns:
        The head; None where SGLang's own is used.
    """
    scorer: TwoStageLogits | None = getattr(worker, "sgl_eagle_head", None)
    return scorer


def run_step(
    worker: Any, forward_batch: Any, step: int, topk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One forward pass of the draft model, and the best children of its nodes.

    Args:
        worker: SGLang's draft worker, its attention metadata planned.
        forward_batch: As in `compat.run_draft_step`.
        step: 0-based draft step.
        topk: T, children of a node.

    Returns:
        [n, T] float32 log-probabilities over the whole vocabulary, descending, [n, T] draft ids,
        and [n, H] hidden states.
    """
    scorer = served_head(worker)
    if scorer is None:
        logits, hidden = compat.run_draft_step(worker, forward_batch, step)
        logits = logits.float()
        best, ids = logits.topk(topk, dim=-1)
        return best - logits.logsumexp(-1, keepdim=True), ids, hidden
    with scorer.passing_inputs():
        head_input, hidden = compat.run_draft_step(worker, forward_batch, step)
    found = scorer.rank(head_input)
    return found.log_probs, found.ids, hidden
