"""Cross entropy of draft heads against the target's softmax, without keeping any logits.

With 49,152 words the logits of one training step would fill the memory of a GPU several times over.
Gradients of the loss in the logits are closed-form, so the forward pass turns each chunk of logits
into the gradient of the head's input at once and drops it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

CHUNK = 8192  # rows of logits in flight: 0.8 GB each in bf16 at 49,152 words


def soft_cross_entropy(
    head_inputs: Tensor, target_hidden: Tensor, lm_head: Tensor, step_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy of every draft step against the target's own distribution.

    Args:
        head_inputs: [S, N, H], draft step by draft step; gradients flow into it.
        target_hidden: [N, H], the target's final hidden states that predict the same tokens.
        lm_head: [V, H], shared and frozen.
        step_weights: [S] float32.

    Returns:
        The loss, a scalar: the sum over steps of weight times mean; and [S] float32 means
        without gradient.
    """
    loss, means = _SoftCrossEntropy.apply(head_inputs, target_hidden, lm_head, step_weights)  # type: ignore[no-untyped-call]
    return loss, means


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  PyTorch's own type
        head_inputs: Tensor,
        target_hidden: Tensor,
        lm_head: Tensor,
        step_weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        num_steps, num_rows, _ = head_inputs.shape
        inputs = head_inputs.to(lm_head.dtype)
        gradients = torch.empty_like(inputs)
        sums = torch.zeros(num_steps, device=inputs.device)
        row_loss = _compiled_row_loss() if inputs.is_cuda else _row_loss
        with torch.autocast(inputs.device.type, enabled=False):
            for start in range(0, num_rows, CHUNK):
                rows = slice(start, start + CHUNK)
                target_logits = target_hidden[rows].to(lm_head.dtype) @ lm_head.T
                for step in range(num_steps):
                    losses, slope = row_loss(inputs[step, rows] @ lm_head.T, target_logits)
                    sums[step] += losses.sum()
                    gradients[step, rows] = slope @ lm_head
        ctx.save_for_backward(gradients * (step_weights / num_rows)[:, None, None])
        ctx.dtype = head_inputs.dtype
        means = sums / num_rows
        ctx.mark_non_differentiable(means)
        return (means * step_weights).sum(), means

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401  likewise
        *grad_outputs: Tensor,
    ) -> tuple[Tensor, None, None, None]:
        (gradients,) = ctx.saved_tensors
        return (gradients * grad_outputs[0]).to(ctx.dtype), None, None, None


def _row_loss(draft_logits: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    # [n] float32 losses, and [n, V] their gradients in the draft's logits.
    target_probs = target_logits.float().softmax(dim=-1)
    draft_log_probs = draft_logits.float().log_softmax(dim=-1)
    losses = -(target_probs * draft_log_probs).sum(dim=-1)
    return losses, (draft_log_probs.exp() - target_probs).to(draft_logits.dtype)


@cache
def _compiled_row_loss() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    # The number of rows varies with the last chunk of each batch.
    return torch.compile(_row_loss, dynamic=True)
